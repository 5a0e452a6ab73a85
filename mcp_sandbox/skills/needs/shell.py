"""What a shell script uses, without its own functions and variables. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from mcp_sandbox.reading.commands import DYNAMIC, names
from mcp_sandbox.reading.shell import Command, Script, read_script
from mcp_sandbox.skills.needs.uses import Uses, read_command

_ENDS = frozenset({"exit", "return", "die", "fail", "error", "fatal", "abort", "err"})
_KNOWN = names(
    "PATH HOME USER PWD OLDPWD SHELL TERM LANG LC_ALL LANGUAGE TMPDIR RANDOM SECONDS LINENO IFS "
    "HOSTNAME HOSTTYPE OSTYPE MACHTYPE UID EUID PPID BASH BASH_SOURCE BASH_VERSION BASH_REMATCH "
    "BASH_LINENO BASH_COMMAND BASH_SUBSHELL BASH_VERSINFO FUNCNAME OPTARG OPTIND OPTERR REPLY "
    "PIPESTATUS PS1 PS2 PS3 PS4 COLUMNS LINES EDITOR PAGER LOGNAME DISPLAY GROUPS SHLVL SKILL_DIR "
    "EPOCHSECONDS EPOCHREALTIME COMP_WORDS COMP_CWORD COMPREPLY MAPFILE PROMPT_COMMAND"
)


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
        ends = bool(guarded) and _ends_without(script.commands[at : at + 6])
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


def _note(command: Command, script: Script, uses: Uses) -> None:
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


def _ends_without(commands: Sequence[Command]) -> bool:
    """Return whether the script ends if the guard fails."""
    guard, *rest = commands
    if not guard.negated and not (rest and rest[0].joined == "||"):
        return False
    for command in rest:
        if command.words[0] in _ENDS:
            return True
        if command.closed:
            return False
    return False
