"""What JavaScript code imports, names and calls. Pure."""

import re
from collections.abc import Iterator

from mcp_sandbox.policy.rules import Code, Fact
from mcp_sandbox.reading.commands import DYNAMIC
from mcp_sandbox.reading.javascript import Tokens, fields, read_tokens, value

_GLOBAL = re.compile(r"^(globalThis|window|global|self)\.")


def read_javascript(text: str) -> Iterator[Fact | Code]:
    """Yield what JavaScript code does, as far as its text tells."""
    tokens = read_tokens(text)
    runs = "child_process" in text
    at = 0
    while at < len(tokens):
        (kind, piece), began, at = tokens[at], at, at + 1
        if kind == "string":
            if code := fields(piece):
                yield Code("javascript", code)
            if _text(tokens, began - 1) in ("from", "import"):
                yield _import(value(piece))
        if kind != "name":
            continue
        while _text(tokens, at) == "." and at + 1 < len(tokens) and tokens[at + 1][0] == "name":
            at += 2
        name = "".join(text for _, text in tokens[began:at])
        before, after = _text(tokens, began - 1), _text(tokens, at)
        if before == "instanceof" or (after == ":" and before in ("{", ",")):
            continue
        name = f"().{name}" if before == "." else _GLOBAL.sub("", name)
        last = name.rsplit(".", 1)[-1]
        literal = value(tokens[at + 1][1]) if after == "(" and _is_text(tokens, at + 1) else ""
        if after == "(" and last in ("require", "import"):
            yield _import(literal if literal and _text(tokens, at + 2) in (")", ",") else DYNAMIC)
        elif after == "(" and last in ("exec", "execSync") and runs:
            yield Code("shell", literal)
        yield Fact("javascript", name, {"name": (name,), "call": (name,) * (after == "(")})


def _import(module: str) -> Fact:
    module = module.removeprefix("node:")
    return Fact("javascript", module, {"import": (module,)})


def _is_text(tokens: Tokens, at: int) -> bool:
    return at < len(tokens) and tokens[at][0] == "string"


def _text(tokens: Tokens, at: int) -> str:
    return tokens[at][1] if 0 <= at < len(tokens) and not _is_text(tokens, at) else ""
