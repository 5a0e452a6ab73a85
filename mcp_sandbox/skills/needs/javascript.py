"""What a script for Node.js uses, in JavaScript or TypeScript. Pure, linear."""

import re
from itertools import takewhile

from mcp_sandbox.reading.code import Token, javascript_tokens, mark
from mcp_sandbox.reading.commands import DYNAMIC, names
from mcp_sandbox.skills.needs.uses import Uses, read_command

_BUILTINS = names(
    "assert async_hooks buffer child_process cluster console constants crypto dgram "
    "diagnostics_channel dns domain events fs http http2 https inspector module net os path "
    "perf_hooks process punycode querystring readline repl stream string_decoder sys timers tls "
    "trace_events tty url util v8 vm wasi worker_threads zlib test sqlite sea"
)
_SHELL = frozenset({"exec", "execSync"})
_ARGV = frozenset({"spawn", "spawnSync", "execFile", "execFileSync", "execa", "execaSync"})
_PACKAGE = re.compile(r"(@[a-z0-9~][\w.~-]*/)?[a-zA-Z0-9~][\w.~-]*")


def read_javascript(text: str) -> Uses:
    """Return what the script uses, without the modules of Node.js itself."""
    uses = Uses()
    tokens = javascript_tokens(text)
    for at, token in enumerate(tokens):
        if token.kind == "string":
            _string(tokens, at, token.text, uses)
        elif [mark(tokens, at + each) for each in (-3, -2, -1, 0)] == ["process", ".", "env", "."]:
            uses.variable(mark(tokens, at + 1))
    return uses


def package_of(name: str) -> str:
    """Return the package of a module; "" for Node.js's own modules, files and addresses."""
    name = name.removeprefix("npm:")
    if name.startswith((".", "/", "#", "node:", "bun:", "jsr:", "http:", "https:", "@/", "~/")):
        return ""
    found = _PACKAGE.match(name)
    package = found[0] if found else ""
    return "" if package.split("/")[0] in _BUILTINS else package


def _string(tokens: list[Token], at: int, text: str, uses: Uses) -> None:
    uses.text(text)
    name, before = mark(tokens, at - 2), mark(tokens, at - 1)
    if before in ("from", "import") or (before == "(" and name in ("require", "import")):
        _module(tokens, at, text, uses)
    elif before == "(":
        _call(tokens, at, name, text, uses)
    elif (name, before) == ("env", "["):
        uses.variable(text)


def _module(tokens: list[Token], at: int, text: str, uses: Uses) -> None:
    package = package_of(text)
    if not package or DYNAMIC in text or _is_type(tokens, at):
        return
    lazy = mark(tokens, at - 1) == "(" and mark(tokens, at - 2) == "import"
    uses.need("node", package, "sometimes" if lazy else "always")


def _is_type(tokens: list[Token], at: int) -> bool:
    """Return whether it is an `import type … from`, which is gone when the script runs."""
    if mark(tokens, at - 1) != "from":
        return False
    words = [token.text for token in tokens[max(0, at - 200) : at]]
    begin = max((i for i, word in enumerate(words) if word in ("import", "export")), default=0)
    return words[begin + 1 : begin + 2] == ["type"] and words[begin + 2 : begin + 3] != ["from"]


def _call(tokens: list[Token], at: int, name: str, text: str, uses: Uses) -> None:
    if name in _SHELL:
        # `pattern.exec("text")` is no command.
        if mark(tokens, at - 3) != "." or mark(tokens, at - 4) in ("child_process", "cp"):
            uses.embed("shell", text)
    elif name in _ARGV:
        given = takewhile(lambda token: token.text not in ("]", ")", "{"), tokens[at : at + 12])
        read_command([token.text for token in given if token.kind == "string"], uses)
