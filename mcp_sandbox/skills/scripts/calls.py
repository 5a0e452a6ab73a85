"""What the calls in Python statements tell: programs that are run, variables, files, hosts."""

import re
from collections.abc import Callable
from dataclasses import replace

from mcp_sandbox.skills.scripts.command import read_command
from mcp_sandbox.skills.scripts.python_lines import Token
from mcp_sandbox.skills.scripts.uses import DYNAMIC, Uses, Weight

_ARGV = frozenset(
    {"run", "call", "check_call", "check_output", "Popen", "create_subprocess_exec", "execvp",
     "execv", "execlp", "spawnlp", "run_process", "open_process"}
)  # fmt: skip
_SHELL = frozenset({"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"})
_OF = frozenset({"subprocess", "sp", "os", "asyncio", "anyio", "commands", "shutil"})
_ENVIRONMENT = re.compile(r"(?:os\.)?(?:environ\.(?:get|pop|setdefault)\(|environ\[|getenv\()$")
_MODE = re.compile(r"[rbtU+]*[wax][rbtU+]*")


class Calls:
    """Reads the calls of one file, a statement at a time."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._lists: dict[str, list[tuple[list[str], Weight]]] = {}
        self._run: list[tuple[list[str], Weight]] = []
        self._lines: list[str] = []
        self._weight: Weight = "always"
        self._asked: set[str] = set()
        self._readers: dict[str, Callable[[tuple[Token, ...], int], None]] = {
            **dict.fromkeys(_ARGV, self._argv),
            **dict.fromkeys(_SHELL, self._shell),
            **dict.fromkeys(("import_module", "__import__"), self._import),
            "which": self._which,
            "open": self._open,
        }

    def take(self, tokens: tuple[Token, ...], weight: Weight) -> None:
        """Note what a statement, of which runs need `weight`, calls and which texts it has."""
        self._weight = weight
        self._remember(tokens)
        for at, token in enumerate(tokens):
            if token.kind == "string":
                self._uses.text(token.text)
                self._variable(tokens, at)
            elif token.text == "(" and at and tokens[at - 1].kind == "name":
                self._call(tokens, at)

    def done(self) -> None:
        """Note the programs; one that the script looks for first is not always needed."""
        for words, weight in self._run:
            read_command(words, self._uses, weight)
        for line in self._lines:
            self._uses.embed("shell", line)
        self._uses.needs = [
            replace(use, weight="sometimes") if use.name in self._asked else use
            for use in self._uses.needs
        ]

    def _remember(self, tokens: tuple[Token, ...]) -> None:
        """Keep `name = ["program", …]` for the call that it is given to."""
        if len(tokens) > 3 and tokens[1].text == "=" and tokens[2].text in "[(":
            words = _strings(tokens, 3)
            known = self._lists.setdefault(tokens[0].text, [])
            if words and len(self._lists) < 200 and len(known) < 20:
                known.append((words, self._weight))

    def _variable(self, tokens: tuple[Token, ...], at: int) -> None:
        before = "".join(token.text for token in tokens[max(0, at - 5) : at])
        if _ENVIRONMENT.search(before):
            self._uses.variable(tokens[at].text)

    def _call(self, tokens: tuple[Token, ...], at: int) -> None:
        name = tokens[at - 1].text
        dotted = at > 2 and tokens[at - 2].text == "."
        if dotted and tokens[at - 3].text not in _OF:
            return
        if name in self._readers:
            self._readers[name](tokens, at + 1)

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
            shell = any(texts[i : i + 3] == ["shell", "=", "True"] for i in range(len(texts)))
            if shell:
                self._shell(tokens, at)
            elif tokens[at - 3].text == ".":
                self._keep(_strings(tokens, at))

    def _keep(self, words: list[str]) -> None:
        if words and len(self._run) < 200:
            self._run.append((words, self._weight))

    def _shell(self, tokens: tuple[Token, ...], at: int) -> None:
        if at < len(tokens) and tokens[at].kind == "string" and len(self._lines) < 200:
            self._lines.append(tokens[at].text)

    def _which(self, tokens: tuple[Token, ...], at: int) -> None:
        if at < len(tokens) and tokens[at].kind == "string":
            self._asked.add(tokens[at].text)

    def _import(self, tokens: tuple[Token, ...], at: int) -> None:
        literal = at < len(tokens) and tokens[at].kind == "string"
        if literal and re.fullmatch(r"[A-Za-z_]\w*", tokens[at].text):
            self._uses.need("python", tokens[at].text, "sometimes")

    def _open(self, tokens: tuple[Token, ...], at: int) -> None:
        texts = tokens[at : at + 3]
        kinds = [token.kind for token in texts]
        if kinds == ["string", "other", "string"] and _MODE.fullmatch(texts[2].text):
            self._uses.write(texts[0].text)


def _strings(tokens: tuple[Token, ...], at: int) -> list[str]:
    """The words of a list from `at` on, DYNAMIC where one is no literal."""
    words: list[str] = []
    expected = True
    for token in tokens[at : at + 200]:
        if token.text in ("]", ")") and token.kind == "other":
            break
        if token.text == "," and token.kind == "other":
            expected = True
        elif token.kind == "string" and expected:
            words.append(token.text)
            expected = False
        elif expected:
            words.append(DYNAMIC)
            expected = False
    return words
