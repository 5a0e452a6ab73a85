"""What JavaScript code imports, names and calls. Pure."""

from collections.abc import Iterator

from mcp_sandbox.policy.rules import Code, Fact
from mcp_sandbox.reading.commands import DYNAMIC
from mcp_sandbox.reading.javascript import Tokens, fields, read_tokens, value

_GLOBALS = ("globalThis.", "window.", "global.", "self.")
_IMPORTS = ("require", "import")


def read_javascript(text: str) -> Iterator[Fact | Code]:
    """Yield what JavaScript code does, as far as its text tells."""
    tokens = read_tokens(text)
    at = 0
    while at < len(tokens):
        kind, piece = tokens[at]
        if kind == "string":
            if code := fields(piece):
                yield Code("javascript", code)
            if _text(tokens, at - 1) in ("from", "import"):
                yield _import(value(piece))
            at += 1
        elif kind == "name":
            began, at = at, _end(tokens, at)
            yield from _use(tokens, began, at)
        else:
            at += 1


def _import(module: str) -> Fact:
    module = module.removeprefix("node:")
    return Fact("javascript", module, {"import": (module,)})


def _text(tokens: Tokens, at: int) -> str:
    return tokens[at][1] if 0 <= at < len(tokens) and tokens[at][0] != "string" else ""


def _end(tokens: Tokens, at: int) -> int:
    at += 1
    while _text(tokens, at) in (".", "?") and at + 1 < len(tokens):
        step = 2 if _text(tokens, at) == "." else 3
        if _text(tokens, at + step - 2) != "." or tokens[at + step - 1 : at + step] == []:
            break
        if tokens[at + step - 1][0] != "name":
            break
        at += step
    return at


def _use(tokens: Tokens, began: int, at: int) -> Iterator[Fact | Code]:
    before, after = _text(tokens, began - 1), _text(tokens, at)
    if before == "instanceof" or (after == ":" and before in ("{", ",")):
        return
    name = "".join(piece for kind, piece in tokens[began:at] if kind == "name" or piece == ".")
    name = f"().{name}" if before == "." else name
    for each in _GLOBALS:
        name = name.removeprefix(each)
    first = tokens[at + 1] if at + 1 < len(tokens) else ("", "")
    if after == "(" and name.rsplit(".", 1)[-1] in _IMPORTS:
        known = first[0] == "string" and _text(tokens, at + 2) in (")", ",")
        yield _import(value(first[1]) if known else DYNAMIC)
        return
    literal = value(first[1]) if first[0] == "string" else ""
    called = {"call": (name,), "literal": (literal,)} if after in ("(", "`") else {}
    yield Fact("javascript", name, {"name": (name,), **called})
    if called and literal and name.rsplit(".", 1)[-1] in ("exec", "execSync"):
        yield Code("shell", literal)
