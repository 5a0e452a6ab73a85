"""What a Python script uses. Pure.

It distinguishes imports that every run needs, those in functions and branches, which some runs
need, and those that a `try` with `except ImportError` makes optional, unless its handler ends the
program.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mcp_sandbox.reading.code import (
    Statement,
    Token,
    python_statements,
    read_arguments,
    read_imports,
    read_literal,
)
from mcp_sandbox.skills.needs.uses import Uses, Weight, read_command

_ARGV = frozenset(
    {"run", "call", "check_call", "check_output", "Popen", "create_subprocess_exec", "execvp",
     "execv", "execlp", "spawnlp", "run_process", "open_process"}
)  # fmt: skip
_SHELL = frozenset({"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"})
_OF = frozenset({"subprocess", "sp", "os", "asyncio", "anyio", "commands", "shutil"})
_ENVIRONMENT = re.compile(r"(?:os\.)?(?:environ\.(?:get|pop|setdefault)\(|environ\[|getenv\()$")
_MODE = re.compile(r"[rbtU+]*[wax][rbtU+]*")
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
    """Return what the script uses; imports include its own modules and the standard library."""
    reader = _UsesReader()
    for statement in python_statements(text):
        reader.take(statement)
    return reader.done()


class _UsesReader:
    def __init__(self) -> None:
        self._uses = Uses()
        self._calls = _Calls(self._uses)
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
        else:
            self._import(tokens)
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
            if attempt and ({token.text for token in tokens[1:]} & _CATCHES or len(tokens) == 2):
                attempt.catches = True
            else:
                attempt = None
        elif word in ("if", "elif") and any(token.text == "TYPE_CHECKING" for token in tokens):
            word = "typing"
        elif word == "if" and any(token.text == "__name__" for token in tokens):
            word = "main"
        if len(self._blocks) < 100:
            self._blocks.append(_Block(indent, word, attempt))

    def _import(self, tokens: tuple[Token, ...]) -> None:
        words = [block.word for block in self._blocks]
        if "typing" in words:
            return
        lazy = any(each in ("def", "if", "elif", "else", "case") for each in words)
        attempts = tuple(b.attempt for b in self._blocks if b.word == "try" and b.attempt)
        handled = [b.attempt for b in self._blocks if b.word == "except" and b.attempt]
        for name in _imported(tokens):
            for attempt in attempts:
                attempt.imports.append(name)
            weight: Weight = "sometimes" if lazy else "always"
            self._imports.append(_Import(name, weight, attempts, handled[-1] if handled else None))

    def _look(self, tokens: tuple[Token, ...]) -> None:
        handler = next((b.attempt for b in self._blocks[::-1] if b.word == "except"), None)
        if handler and any(t.kind == "name" and t.text in _ENDS for t in tokens):
            handler.ends = True
        some = any(block.word in ("if", "elif", "else", "case", "except") for block in self._blocks)
        self._calls.take(tokens, "sometimes" if some else "always")


def _imported(tokens: tuple[Token, ...]) -> list[str]:
    each = (f"{module}.{name}".rstrip(".") for module, name, _ in read_imports(tokens))
    return [*dict.fromkeys(_root(name) for name in each if re.match(r"[^\W\d]", name))]


def _root(name: str) -> str:
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first in NAMESPACES and rest else first


class _Calls:
    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._lists: dict[str, list[tuple[list[str], Weight]]] = {}
        self._run: list[tuple[list[str], Weight]] = []
        self._weight: Weight = "always"
        self._asked: set[str] = set()
        self._readers: dict[str, Callable[[tuple[Token, ...], int], None]] = {
            **dict.fromkeys(_ARGV, self._argv),
            **dict.fromkeys(_SHELL, self._shell),
            **dict.fromkeys(("import_module", "__import__"), self._import),
            "which": lambda tokens, at: self._asked.add(_literal(tokens, at)),
            "open": self._open,
        }

    def take(self, tokens: tuple[Token, ...], weight: Weight) -> None:
        """Note what a statement, of which runs need `weight`, calls and which texts it has."""
        self._weight = weight
        if len(tokens) > 3 and tokens[1].text == "=" and tokens[2].text in "[(":
            words = _strings(tokens, 3)
            known = self._lists.setdefault(tokens[0].text, [])
            if words and len(self._lists) < 200 and len(known) < 20:
                known.append((words, self._weight))
        for at, token in enumerate(tokens):
            if token.kind == "string":
                self._uses.text(token.text)
                if _ENVIRONMENT.search("".join(each.text for each in tokens[max(0, at - 5) : at])):
                    self._uses.variable(token.text)
            elif token.text == "(" and at and tokens[at - 1].kind == "name":
                name, dotted = tokens[at - 1].text, at > 2 and tokens[at - 2].text == "."
                if name in self._readers and not (dotted and tokens[at - 3].text not in _OF):
                    self._readers[name](tokens, at + 1)

    def done(self) -> None:
        """Note the programs; one that the script looks for first is not always needed."""
        for words, weight in self._run:
            read_command(words, self._uses, weight)
        self._uses.needs = [
            replace(use, weight="sometimes") if use.name in self._asked else use
            for use in self._uses.needs
        ]

    def _argv(self, tokens: tuple[Token, ...], at: int) -> None:
        rest = tokens[at : at + 400]
        if not rest:
            return
        first = rest[0]
        if first.kind == "name" and first.text in self._lists:
            self._run.extend(self._lists.pop(first.text)[: 200 - len(self._run)])
        elif first.text == "[":
            self._keep(_strings(tokens, at + 1))
        elif first.kind == "string":
            texts = [token.text for token in rest]
            if any(texts[i : i + 3] == ["shell", "=", "True"] for i in range(len(texts))):
                self._shell(tokens, at)
            elif tokens[at - 3].text == ".":
                self._keep(_strings(tokens, at))

    def _keep(self, words: list[str]) -> None:
        if words and len(self._run) < 200:
            self._run.append((words, self._weight))

    def _shell(self, tokens: tuple[Token, ...], at: int) -> None:
        self._uses.embed("shell", _literal(tokens, at))

    def _import(self, tokens: tuple[Token, ...], at: int) -> None:
        if re.fullmatch(r"[A-Za-z_]\w*", module := _literal(tokens, at)):
            self._uses.need("python", module, "sometimes")

    def _open(self, tokens: tuple[Token, ...], at: int) -> None:
        texts = tokens[at : at + 3]
        kinds = [token.kind for token in texts]
        if kinds == ["string", "other", "string"] and _MODE.fullmatch(texts[2].text):
            self._uses.write(texts[0].text)


def _literal(tokens: tuple[Token, ...], at: int) -> str:
    return tokens[at].text if at < len(tokens) and tokens[at].kind == "string" else ""


def _strings(tokens: tuple[Token, ...], at: int) -> list[str]:
    return [read_literal(each) for each in read_arguments(tokens, at, 200)]
