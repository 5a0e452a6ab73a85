"""What Python code imports, names and calls, by whatever name. Pure."""

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
_RUNS = names("system popen getoutput getstatusoutput create_subprocess_shell run call "
              "check_call check_output Popen create_subprocess_exec")  # fmt: skip
_MOST_ARGUMENTS = 60


def read_python(text: str) -> Iterator[Fact | Code]:
    """Yield what Python code does, as far as its text tells."""
    read = [statement.tokens for statement in statements(text)]
    known: dict[str, str] = {}
    for tokens in read:
        if tokens[0].text in ("import", "from"):
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
        full = f"{package}.{module}" if package else module
        if full and not package:
            yield full
        if module == "*":
            known["*"] = f"{package}."
        elif module:
            own = name or (module if package else module.split(".")[0])
            known[own] = full if name or package else own


def _uses(tokens: Sequence[Token], known: dict[str, str]) -> Iterator[Fact | Code]:
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.code:
            yield Code("python", token.code)
        if token.kind != "name" or token.text in _KEYWORDS:
            at += 1
            continue
        began, at = at, _end(tokens, at)
        name = "".join(each.text for each in tokens[began:at])
        before, after = _text(tokens, began - 1), _text(tokens, at)
        if before in ("def", "class") or (after == "=" and _text(tokens, at + 1) != "="):
            continue
        if before == ".":
            name = f"().{name}"
        names = {_known(name, known), known.get("*", "") + name}
        for each in names if "*" in known else {_known(name, known)}:
            yield from _use(each, tokens, at)
        if began == 2 and at == len(tokens) and tokens[1].text == "=":
            known[tokens[0].text] = _known(name, known)


def _text(tokens: Sequence[Token], at: int) -> str:
    return tokens[at].text if 0 <= at < len(tokens) and tokens[at].kind != "string" else ""


def _end(tokens: Sequence[Token], at: int) -> int:
    """Where the chain of names ends that begins at a name."""
    at += 1
    while _text(tokens, at) == "." and at + 1 < len(tokens) and tokens[at + 1].kind == "name":
        at += 2
    return at


def _known(name: str, known: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{known.get(first, first)}{dot}{rest}".removeprefix("builtins.")


def _use(name: str, tokens: Sequence[Token], at: int) -> Iterator[Fact | Code]:
    if _text(tokens, at) != "(":
        yield Fact("python", name, {"name": (name,)})
        return
    given = _arguments(tokens, at + 1)
    texts = [each[0].text for each in given if len(each) == 1 and each[0].kind == "string"]
    if name.rsplit(".", 1)[-1] == "open":
        texts = [_mode(name, given)]
    values = {"name": (name,), "call": (name,), "literal": texts or ("",)}
    yield Fact("python", name, values)
    last = name.rsplit(".", 1)[-1]
    if name == "getattr" and texts and len(given) > 1:
        first = "".join(token.text for token in given[0])
        yield Fact("python", name, {"name": (f"{first}.{texts[0]}".removeprefix("builtins."),)})
    elif name in ("exec", "eval") and texts:
        yield Code("python", texts[0])
    elif last in _RUNS and given:
        words = [each[0].text for each in _list(given[0])]
        yield Code("shell", shlex.join(words) if words else texts[0] if texts else "")


def _arguments(tokens: Sequence[Token], at: int) -> list[list[Token]]:
    """The tokens of each argument of a call, up to so many of them."""
    found: list[list[Token]] = [[]]
    depth = 0
    for token in tokens[at : at + _MOST_ARGUMENTS]:
        other = token.kind == "other"
        if other and depth == 0 and token.text in ")]}":
            break
        if other and depth == 0 and token.text == ",":
            found.append([])
            continue
        depth += other and token.text in "([{"
        depth -= other and token.text in ")]}"
        found[-1].append(token)
    return [each for each in found if each]


def _list(tokens: Sequence[Token]) -> list[list[Token]]:
    """The elements of a list or tuple, each that is no literal as DYNAMIC."""
    if tokens[0].kind != "other" or tokens[0].text not in "[(":
        return []
    unknown = [Token("string", DYNAMIC)]
    elements = _arguments(tokens, 1)
    return [e if len(e) == 1 and e[0].kind == "string" else unknown for e in elements]


def _mode(name: str, given: list[list[Token]]) -> str:
    """How a call of `open` opens: its mode, `r` without one, DYNAMIC where it is computed."""
    plain = name in ("open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open")
    for at, argument in enumerate(given):
        named = _text(argument, 0) == "mode" and _text(argument, 1) == "="
        if named or (at == int(plain) and _text(argument, 1) != "="):
            value = argument[-1] if named or len(argument) == 1 else None
            return value.text if value and value.kind == "string" else DYNAMIC
    return "r"
