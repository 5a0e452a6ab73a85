"""What Python and JavaScript code imports, names and calls, aliases resolved. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence

from mcp_sandbox.policy.rules import Code, Fact
from mcp_sandbox.reading.code import (
    Token,
    javascript_tokens,
    mark,
    python_statements,
    read_arguments,
    read_imports,
    read_literal,
)
from mcp_sandbox.reading.commands import DYNAMIC, names

_GLOBAL = re.compile(r"^(globalThis|window|global|self)\.")
_KEYWORDS = names(
    "and as assert async await break class continue def del elif else except finally for from "
    "global if import in is lambda nonlocal not or pass raise return try while with yield "
    "True False None match case self"
)
_RUNS = re.compile(
    r"(os|posix|subprocess|asyncio|anyio|pty)\.(system|popen|getoutput|getstatusoutput|run\w*|call|"
    r"check_\w+|Popen|create_subprocess_\w+|spawn|open_process)"
)
_MOST_READ = 40


def read_javascript(text: str) -> Iterator[Fact | Code]:
    """Yield what JavaScript code does, as far as its text tells."""
    tokens, runs = javascript_tokens(text), "child_process" in text
    yield from (Code("javascript", token.code) for token in tokens if token.code)
    for at, token in enumerate(tokens):
        if token.kind == "string" and mark(tokens, at - 1) in ("from", "import"):
            yield _import("javascript", token.text.removeprefix("node:"))
    for full, began, at in _named(tokens):
        name = _GLOBAL.sub("", full)
        before, after = mark(tokens, began - 1), mark(tokens, at)
        if before == "instanceof" or (after == ":" and before in ("{", ",")):
            continue
        last, given = name.rsplit(".", 1)[-1], tokens[at + 1 : at + 3]
        text = given[0].text if after == "(" and given and given[0].kind == "string" else ""
        if after == "(" and last in ("require", "import"):
            module = text if mark(given, 1) in (")", ",") else ""
            yield _import("javascript", module.removeprefix("node:") or DYNAMIC)
        elif after == "(" and last in ("exec", "execSync") and runs:
            yield Code("shell", text)
        calls = (name,) * (after == "(")
        yield Fact("javascript", name, {"name": (name,), "call": calls, "literal": (text,)})


def read_python(text: str) -> Iterator[Fact | Code]:
    """Yield what Python code does, as far as its text tells."""
    read = [*python_statements(text)]
    known = dict[str, str]()
    for tokens in read:
        for module, name, called in read_imports(tokens):
            yield _import("python", module)
            if name:
                known[called or name] = f"{module}." if name == "*" else f"{module}.{name}"
            else:
                known[called or module.split(".")[0]] = module if called else module.split(".")[0]
    for tokens in read:
        if tokens[0].text not in ("import", "from"):
            yield from _uses(tokens, known)


def _import(language: str, module: str) -> Fact:
    return Fact(language, module, {"import": (module,)})


def _named(
    tokens: Sequence[Token], keywords: frozenset[str] = frozenset()
) -> Iterator[tuple[str, int, int]]:
    """Yield each name with its members, `().x` if they are of no name; its begin and its end."""
    at = 0
    while at < len(tokens):
        began, at = at, at + 1
        if tokens[began].kind != "name" or tokens[began].text in keywords:
            continue
        while mark(tokens, at) == "." and at + 1 < len(tokens) and tokens[at + 1].kind == "name":
            at += 2
        of_no_name = "()." * (mark(tokens, began - 1) == ".")
        yield of_no_name + "".join(each.text for each in tokens[began:at]), began, at


def _uses(tokens: Sequence[Token], known: dict[str, str]) -> Iterator[Fact | Code]:
    yield from (Code("python", token.code) for token in tokens if token.code)
    for name, began, at in _named(tokens, _KEYWORDS):
        before, after = mark(tokens, began - 1), mark(tokens, at)
        if before in ("def", "class") or (after == "=" and mark(tokens, at + 1) != "="):
            continue
        full = _full(name, known)
        yield from _use(full, tokens, at, known)
        if "*" in known and before != ".":
            yield from _use(known["*"] + name, tokens, at, known)
        if began == 2 and at == len(tokens) and mark(tokens, 1) == "=":
            known[tokens[0].text] = full[:200]


def _full(name: str, known: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{known.get(first, first)}{dot}{rest}".removeprefix("builtins.")


def _use(
    name: str, tokens: Sequence[Token], at: int, known: dict[str, str]
) -> Iterator[Fact | Code]:
    if mark(tokens, at) != "(":
        yield Fact("python", name, {"name": (name,)})
        return
    given = read_arguments(tokens, at + 1, _MOST_READ)
    texts = [read_literal(argument) for argument in given]
    literals = (*texts, *(f"{number}={text}" for number, text in enumerate(texts)))
    yield Fact("python", name, {"name": (name,), "call": (name,), "literal": literals})
    if name == "getattr" and len(texts) > 1:
        module = mark(given[0], 0)
        yield Fact("python", name, {"name": (_full(f"{module}.{texts[1]}", known),)})
    elif name in ("exec", "eval") and texts:
        yield Code("python", texts[0])
    elif texts and _RUNS.fullmatch(name):
        first = given[0][2:] if mark(given[0], 1) == "=" else given[0]
        listed = mark(first, 0) in ("[", "(")
        items = read_arguments(first, 1, _MOST_READ) if listed else [first]
        words = [read_literal(each) for each in items]
        if listed or words != [DYNAMIC]:
            yield Code("shell", shlex.join(words) if listed else words[0])
