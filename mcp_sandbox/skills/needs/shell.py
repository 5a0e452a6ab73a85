"""What a script of a shell or for Node.js uses, beyond what it defines itself. Pure, linear."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from mcp_sandbox.reading.code import Token, javascript_tokens, mark
from mcp_sandbox.reading.commands import DYNAMIC, names
from mcp_sandbox.reading.shell import Script, SimpleCommand, read_script
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
_ENDS = frozenset({"exit", "return", "die", "fail", "error", "fatal", "abort", "err"})
_KNOWN = names(
    "PATH HOME USER PWD OLDPWD SHELL TERM LANG LC_ALL LANGUAGE TMPDIR RANDOM SECONDS LINENO IFS "
    "HOSTNAME HOSTTYPE OSTYPE MACHTYPE UID EUID PPID BASH BASH_SOURCE BASH_VERSION BASH_REMATCH "
    "BASH_LINENO BASH_COMMAND BASH_SUBSHELL BASH_VERSINFO FUNCNAME OPTARG OPTIND OPTERR REPLY "
    "PIPESTATUS PS1 PS2 PS3 PS4 COLUMNS LINES EDITOR PAGER LOGNAME DISPLAY GROUPS SHLVL SKILL_DIR "
    "EPOCHSECONDS EPOCHREALTIME COMP_WORDS COMP_CWORD COMPREPLY MAPFILE PROMPT_COMMAND"
)


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


def read_shell(text: str) -> Uses:
    """Return what the script uses, without its own functions and variables."""
    script = read_script(text)
    uses = Uses()
    own = [[name] for name in script.functions]
    asked: dict[str, bool] = {}
    for at, command in enumerate(script.commands):
        guarded = _guarded(command.words)
        if guarded is None:
            _note(command, script, uses)
        ends = bool(guarded) and _ends_if_guard_fails(script.commands[at : at + 6])
        for name in guarded or ():
            asked[name] = asked.get(name, False) or ends
    uses.needs = [
        replace(use, weight="optional")
        if use.kind == "command" and not asked.get(use.name, True)
        else use
        for use in uses.needs
    ]
    uses.embedded = [each for each in uses.embedded if each[1].split(maxsplit=1)[:1] not in own]
    for name in [name for name, ends in asked.items() if ends]:
        uses.need("command", name)
    for name in script.read_variables - script.set_variables - _KNOWN:
        if name.isupper():
            uses.variable(name)
    for path in script.writes:
        uses.write(path)
    return uses


def _note(command: SimpleCommand, script: Script, uses: Uses) -> None:
    if command.words[0] in script.functions:
        # Its arguments may be a command that the function runs.
        for word in command.words:
            uses.text(word)
    else:
        read_command(command.words, uses)
    if command.heredoc and command.words[0].startswith("python"):
        if all(word.startswith("-") for word in command.words[1:]):
            uses.embed("python", command.heredoc)
    elif command.heredoc and command.words[0] in ("bash", "sh"):
        uses.embed("shell", command.heredoc)
    elif command.heredoc:
        uses.text(command.heredoc)


def _guarded(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the programs that a `command -v` or the like looks for; None for other commands."""
    if words[0] == "command" and len(words) > 2 and words[1] in ("-v", "-V"):
        asked = words[2:]
    elif words[0] in ("which", "type", "hash") and len(words) > 1:
        asked = words[1:]
    else:
        return None
    return tuple(name for name in asked if DYNAMIC not in name and not name.startswith("-"))


def _ends_if_guard_fails(commands: Sequence[SimpleCommand]) -> bool:
    guard, *rest = commands
    if not guard.negated and not (rest and rest[0].joined == "||"):
        return False
    for command in rest:
        if command.words[0] in _ENDS:
            return True
        if command.closed:
            return False
    return False
