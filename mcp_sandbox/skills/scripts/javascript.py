"""What a script for Node.js uses, in JavaScript or TypeScript. Pure, linear."""

import re

from mcp_sandbox.reading.commands import DYNAMIC, names
from mcp_sandbox.reading.javascript import Tokens, read_tokens, value
from mcp_sandbox.skills.scripts.uses import Uses, read_command

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
    """What the script uses; modules of Node.js itself are not among it."""
    uses = Uses()
    tokens = read_tokens(text)
    for at, (kind, piece) in enumerate(tokens):
        if kind == "string":
            _string(tokens, at, value(piece), uses)
        elif kind == "name" and piece == "env":
            around = [text for _, text in tokens[max(0, at - 2) : at + 2]]
            if around == ["process", ".", "env", "."] and at + 2 < len(tokens):
                uses.variable(tokens[at + 2][1])
    return uses


def package_of(name: str) -> str:
    """The package that a module belongs to; empty for Node.js's own, files and addresses."""
    name = name.removeprefix("npm:")
    if name.startswith((".", "/", "#", "node:", "bun:", "jsr:", "http:", "https:", "@/", "~/")):
        return ""
    found = _PACKAGE.match(name)
    package = found[0] if found else ""
    return "" if package.split("/")[0] in _BUILTINS else package


def _string(tokens: Tokens, at: int, text: str, uses: Uses) -> None:
    uses.text(text)
    before = [piece for _, piece in tokens[max(0, at - 3) : at]]
    if before[-1:] in (["from"], ["import"]) or before[-2:] in (["require", "("], ["import", "("]):
        _module(tokens, at, text, uses)
    elif before[-1:] == ["("] and len(before) > 1:
        _call(tokens, at, before[-2], text, uses)
    elif before[-2:] == ["env", "["]:
        uses.variable(text)


def _module(tokens: Tokens, at: int, text: str, uses: Uses) -> None:
    package = package_of(text)
    if not package or DYNAMIC in text or _is_type(tokens, at):
        return
    lazy = tokens[at - 1][1] == "(" and tokens[at - 2][1] == "import"
    uses.need("node", package, "sometimes" if lazy else "always")


def _is_type(tokens: Tokens, at: int) -> bool:
    """`import type … from`, which is gone when the script runs."""
    if tokens[at - 1][1] != "from":
        return False
    words = [piece for _, piece in tokens[max(0, at - 200) : at]]
    begin = max((i for i, word in enumerate(words) if word in ("import", "export")), default=0)
    return words[begin + 1 : begin + 2] == ["type"] and words[begin + 2 : begin + 3] != ["from"]


def _call(tokens: Tokens, at: int, name: str, text: str, uses: Uses) -> None:
    if name in _SHELL:
        # `pattern.exec("text")` is no command.
        if tokens[at - 3][1] != "." or tokens[at - 4][1] in ("child_process", "cp"):
            uses.embed("shell", text)
    elif name in _ARGV:
        words = [text]
        for kind, piece in tokens[at + 1 : at + 12]:
            if piece in ("]", ")", "{"):
                break
            if kind == "string":
                words.append(value(piece))
        read_command(words, uses)
