"""What Python code imports, names and calls, by whatever name. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence

from mcp_sandbox.policy.rules import Code, Fact
from mcp_sandbox.reading.commands import DYNAMIC, names
from mcp_sandbox.reading.python import Token, statements

_KEYWORDS = names(
    "and as assert async await break class continue def del elif else except finally for from "
    "global if import in is lambda nonlocal not or pass raise return try while with yield "
    "True False None match case self"
)
_RUNS = re.compile(
    r"(os|posix|subprocess|asyncio|anyio|pty)\.(system|popen|getoutput|getstatusoutput|run\w*|call|"
    r"check_\w+|Popen|create_subprocess_\w+|spawn|open_process)"
)
_MOST_ARGUMENTS = 40


def read_python(text: str) -> Iterator[Fact | Code]:
    """Yield what Python code does, as far as its text tells."""
    read = [statement.tokens for statement in statements(text)]
    imports = [tokens for tokens in read if tokens[0].text in ("import", "from")]
    known: dict[str, str] = {}
    for tokens in imports:
        for module in _imported(tokens, known):
            yield Fact("python", module, {"import": (module,)})
    for tokens in read:
        if tokens[0].text not in ("import", "from"):
            yield from _uses(tokens, known)


def _imported(tokens: Sequence[Token], known: dict[str, str]) -> Iterator[str]:
    """Yield the modules of an import, and note what they are called from then on."""
    text = "".join(f" {t.text} " if t.text in ("as", "import") else t.text for t in tokens[1:])
    package = ""
    if tokens[0].text == "from":
        package, _, text = text.partition(" import ")
        yield package
    for each in text.strip("()").split(","):
        module, _, name = (part.strip() for part in each.partition(" as "))
        if package:
            known[name or module] = f"{package}." if module == "*" else f"{package}.{module}"
        elif module:
            yield module
            known[name or module.split(".")[0]] = module if name else module.split(".")[0]


def _uses(tokens: Sequence[Token], known: dict[str, str]) -> Iterator[Fact | Code]:
    at = 0
    while at < len(tokens):
        token, began, at = tokens[at], at, at + 1
        if token.code:
            yield Code("python", token.code)
        if token.kind != "name" or token.text in _KEYWORDS:
            continue
        while _text(tokens, at) == "." and at + 1 < len(tokens) and tokens[at + 1].kind == "name":
            at += 2
        before, after = _text(tokens, began - 1), _text(tokens, at)
        if before in ("def", "class") or (after == "=" and _text(tokens, at + 1) != "="):
            continue
        name = "".join(each.text for each in tokens[began:at])
        full = f"().{name}" if before == "." else _full(name, known)
        yield from _use(full, tokens, at, known)
        if "*" in known:
            yield from _use(known["*"] + name, tokens, at, known)
        if began == 2 and at == len(tokens) and tokens[1].text == "=":
            known[tokens[0].text] = full[:200]


def _full(name: str, known: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{known.get(first, first)}{dot}{rest}".removeprefix("builtins.")


def _text(tokens: Sequence[Token], at: int) -> str:
    return tokens[at].text if 0 <= at < len(tokens) and tokens[at].kind != "string" else ""


def _use(
    name: str, tokens: Sequence[Token], at: int, known: dict[str, str]
) -> Iterator[Fact | Code]:
    if _text(tokens, at) != "(":
        yield Fact("python", name, {"name": (name,)})
        return
    given = _arguments(tokens, at + 1)
    texts = [_literal(argument) for argument in given]
    literals = (*texts, *(f"{number}={text}" for number, text in enumerate(texts)))
    yield Fact("python", name, {"name": (name,), "call": (name,), "literal": literals})
    if name == "getattr" and len(texts) > 1:
        module = _text(given[0], 0)
        yield Fact("python", name, {"name": (_full(f"{module}.{texts[1]}", known),)})
    elif name in ("exec", "eval") and texts:
        yield Code("python", texts[0])
    elif texts and _RUNS.fullmatch(name):
        listed = _text(given[0], 0) in ("[", "(")
        words = [_literal(each) for each in _arguments(given[0], 1)] if listed else []
        if listed or texts[0] != DYNAMIC:
            yield Code("shell", shlex.join(words) if listed else texts[0])


def _arguments(tokens: Sequence[Token], at: int) -> list[list[Token]]:
    """The tokens of each argument of a call, or of each element of a list."""
    found, depth = list[list[Token]]([[]]), 0
    for token in tokens[at : at + _MOST_ARGUMENTS]:
        mark = token.text if token.kind == "other" else ""
        depth += (mark in ("(", "[", "{")) - (mark in (")", "]", "}"))
        if depth < 0:
            break
        if mark == "," and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    return [each for each in found if each]


def _literal(argument: Sequence[Token]) -> str:
    """The text of a literal, after the name of its parameter if it has one; else DYNAMIC."""
    named = _text(argument, 1) == "="
    name, value = (f"{argument[0].text}=", argument[2:]) if named else ("", argument)
    known = len(value) == 1 and value[0].kind == "string"
    return name + (value[0].text if known else DYNAMIC)
