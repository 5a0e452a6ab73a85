"""What a Python script uses. Pure.

Told apart are imports that every run needs, those inside of functions and branches, which some
runs need, and those that a `try` with `except ImportError` makes optional, unless its handler ends
the program.
"""

import re
from dataclasses import dataclass, field

from mcp_sandbox.skills.scripts.calls import Calls
from mcp_sandbox.skills.scripts.python_lines import Statement, Token, statements
from mcp_sandbox.skills.scripts.uses import DYNAMIC, Uses, Weight

_CATCHES = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_ENDS = frozenset({"exit", "_exit", "quit", "SystemExit", "raise", "abort", "die", "fatal"})
# Their parts come from different distributions.
NAMESPACES = frozenset({"google", "azure", "ruamel", "zope", "opentelemetry", "sphinxcontrib"})


@dataclass(eq=False)
class _Try:
    """A `try` with what is imported in it, until its handlers are read."""

    imports: list[str] = field(default_factory=list[str])
    catches: bool = False
    ends: bool = False


@dataclass
class _Block:
    indent: int
    word: str
    attempt: _Try | None = None


@dataclass(frozen=True)
class _Import:
    name: str
    weight: Weight
    attempts: tuple[_Try, ...]
    instead_of: _Try | None


def read_python(text: str) -> Uses:
    """What the script uses; its own modules and the standard library are among the imports."""
    reader = _Reader()
    for statement in statements(text, DYNAMIC):
        reader.take(statement)
    return reader.done()


class _Reader:
    def __init__(self) -> None:
        self._uses = Uses()
        self._calls = Calls(self._uses)
        self._blocks: list[_Block] = []
        self._imports: list[_Import] = []
        self._last_try: _Try | None = None

    def done(self) -> Uses:
        for each in self._imports:
            soft = any(attempt.catches and not attempt.ends for attempt in each.attempts)
            before = each.instead_of.imports if each.instead_of else []
            unless = before[0] if before else ""
            weight: Weight = "optional" if soft else each.weight
            self._uses.need("python", each.name, weight, unless)
        self._calls.done()
        return self._uses

    def take(self, statement: Statement) -> None:
        tokens, word = statement.tokens, statement.tokens[0].text
        if not statement.follows:
            self._leave(statement.indent)
        if word == "async" and len(tokens) > 1:
            word = tokens[1].text
        if tokens[-1].text == ":":
            self._enter(statement.indent, word, tokens)
        elif word in ("import", "from"):
            self._import(word, tokens)
        self._look(tokens)

    def _leave(self, indent: int) -> None:
        while self._blocks and self._blocks[-1].indent >= indent:
            block = self._blocks.pop()
            if block.word == "try" and block.indent == indent:
                self._last_try = block.attempt

    def _enter(self, indent: int, word: str, tokens: tuple[Token, ...]) -> None:
        attempt: _Try | None = None
        if word == "try":
            attempt = _Try()
        elif word == "except":
            attempt = self._last_try
            names = {token.text for token in tokens[1:]}
            if attempt and (names & _CATCHES or len(tokens) == 2):
                attempt.catches = True
            else:
                attempt = None
        elif word in ("if", "elif") and any(token.text == "TYPE_CHECKING" for token in tokens):
            word = "typing"
        elif word == "if" and any(token.text == "__name__" for token in tokens):
            word = "main"
        if len(self._blocks) < 100:
            self._blocks.append(_Block(indent, word, attempt))

    def _import(self, word: str, tokens: tuple[Token, ...]) -> None:
        words = [block.word for block in self._blocks]
        if "typing" in words:
            return
        lazy = any(each in ("def", "if", "elif", "else", "case") for each in words)
        attempts = tuple(b.attempt for b in self._blocks if b.word == "try" and b.attempt)
        handled = [b.attempt for b in self._blocks if b.word == "except" and b.attempt]
        for name in _imported(word, tokens):
            for attempt in attempts:
                attempt.imports.append(name)
            instead_of = handled[-1] if handled else None
            weight: Weight = "sometimes" if lazy else "always"
            self._imports.append(_Import(name, weight, attempts, instead_of))

    def _look(self, tokens: tuple[Token, ...]) -> None:
        handler = next((b.attempt for b in self._blocks[::-1] if b.word == "except"), None)
        if handler and any(t.kind == "name" and t.text in _ENDS for t in tokens):
            handler.ends = True
        branches = ("if", "elif", "else", "case", "except")
        some = any(block.word in branches for block in self._blocks)
        self._calls.take(tokens, "sometimes" if some else "always")


def _imported(word: str, tokens: tuple[Token, ...]) -> list[str]:
    """The modules of an import statement, each as the part that a distribution is found by."""
    if word == "from":
        end = next((i for i, t in enumerate(tokens) if t.text == "import"), 0)
        names = ["".join(t.text for t in tokens[1:end])]
        after = [t.text for t in tokens[end + 1 :] if t.kind == "name"]
        if names[0] in NAMESPACES and after:
            names = [f"{names[0]}.{after[0]}"]
    else:
        text = "".join(f" {t.text} " if t.text == "as" else t.text for t in tokens[1:])
        names = [each.split(" ")[0] for each in text.split(",")]
    return [_root(name) for name in names if re.fullmatch(r"[^\W\d][\w.]*", name)]


def _root(name: str) -> str:
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first in NAMESPACES and rest else first
