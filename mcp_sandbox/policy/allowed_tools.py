"""Which tools a skill's `allowed-tools` leaves to the model. Pure; it restricts, never permits.

Our tools, and the entries of Claude Code and other clients that allow them:

    exec, run_code            Bash, Bash(prefix:*), Bash(pattern)
    read_file                 Read, Read(pattern)
    list_files                LS, Glob, Read
    glob, grep                Glob; Grep
    write_file                Write, Write(pattern)
    edit_file                 Edit, MultiEdit, Edit(pattern)
    delete_file, move_file    Bash(rm:*), Bash(mv:*)
    any                       its own name, mcp__…__name, mcp__sandbox, *

A command line is allowed if each of its commands is, those in substitutions too.
"""

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mcp_sandbox.reading.commands import DYNAMIC
from mcp_sandbox.reading.shell import read_script

ALWAYS = frozenset({"skills_list", "skill_activate", "sandbox_info", "process"})
"""Tools that no skill can forbid."""

_NAMES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("exec", "run_code", "delete_file", "move_file"),
        frozenset({"Bash", "Shell", "shell", "run_shell_command"}),
    ),
    "read_file": frozenset({"Read", "NotebookRead", "read_many_files"}),
    "list_files": frozenset({"LS", "Glob", "Read", "list_directory"}),
    "glob": frozenset({"Glob"}),
    "grep": frozenset({"Grep", "search_file_content"}),
    "write_file": frozenset({"Write"}),
    "edit_file": frozenset({"Edit", "MultiEdit", "replace"}),
}
_LANGUAGES = {"python": ("python3 -c", "python -c"), "javascript": ("node -e",)}
_ENTRY = re.compile(r"([\w.*-]+)(?:\((.*)\))?", re.DOTALL)
_OURS = re.compile(r"mcp__(?:mcp[-_])?sandbox(?:__\*)?")
_OF_A_SERVER = re.compile(r"mcp__.{1,128}__(\w{1,128})")
_FOLDER = re.compile(
    r"\$\{(?:CLAUDE_SKILL_DIR|CLAUDE_PLUGIN_ROOT|SKILL_DIR)\}|\$SKILL_DIR|\{baseDir\}"
)
# They change nothing but the shell itself. `[[` is not among them: it runs what is in subscripts.
_HARMLESS = frozenset({"cd", "pwd", "true", "false", "test", "[", ":", "set", "exit"})
_FLAG = re.compile(r"[-+][A-Za-z]+|pipefail")
# What may look into a variable's value for an expression, and run what is in its subscripts.
_EVALUATES = re.compile(r"\(\(|\$\{|\[")
_NOWHERE = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr"})
_ELSEWHERE = re.compile(r"\s|['\"`~$]|file:")
_MOST_COMMAND = 65_536
_SHOWN = 400
Given = Mapping[str, object]


@dataclass(frozen=True)
class ActiveSkill:
    """A skill that a chat has activated, and which version of it."""

    uri: str
    name: str
    digest: str
    path_in_sandbox: str | None
    allowed_tools: tuple[str, ...] = ()


def refusal(active: Iterable[ActiveSkill], tool: str, arguments: Given) -> str | None:
    """Return why no active skill allows a call, or None if one of them does.

    A skill that names no tools neither allows nor forbids any.
    """
    narrowing = [skill for skill in active if skill.allowed_tools]
    if not narrowing or tool in ALWAYS:
        return None
    if any(_allows(skill, tool, arguments) for skill in narrowing):
        return None
    allowed = "; ".join(f"{skill.name}: {', '.join(skill.allowed_tools)}" for skill in narrowing)
    if len(allowed) > _SHOWN:
        allowed = f"{allowed[:_SHOWN]}…"
    return f"this call of {tool} is not among the allowed-tools of the active skills ({allowed})"


def _allows(skill: ActiveSkill, tool: str, arguments: Given) -> bool:
    folder = skill.path_in_sandbox or ""
    patterns = []
    for entry in skill.allowed_tools:
        found = _ENTRY.fullmatch(entry.strip())
        if not found:
            continue
        name, pattern = found.groups()
        of_a_server = _OF_A_SERVER.fullmatch(name)
        meant = of_a_server[1] if of_a_server else name
        if tool in (name, meant) or name == "*" or _OURS.fullmatch(name):
            return True
        if name in _NAMES.get(tool, ()):
            if pattern is None or pattern in ("*", ":*", "**"):
                return True
            patterns.append(_FOLDER.sub(lambda _: folder, pattern) if folder else pattern)

    def may_write(path: str) -> bool:
        # A relative path can be resolved only if the call sets no folder of its own.
        known = path.startswith("/") or not (path.startswith("~") or arguments.get("cwd"))
        return known and _allows(skill, "write_file", {"path": path})

    return bool(patterns) and _matches(patterns, tool, arguments, may_write)


def _matches(
    patterns: Sequence[str], tool: str, arguments: Given, may_write: Callable[[str], bool]
) -> bool:
    if arguments.get("env"):
        # A variable may make another program of a command.
        return False
    lines = _lines(tool, {name: str(value) for name, value in arguments.items()})
    if lines:
        return any(_line_matches(patterns, line, may_write) for line in lines)
    path = str(arguments.get({"glob": "pattern", "grep": "glob"}.get(tool, "")) or "")
    if not (path.startswith("/") or _ELSEWHERE.match(path)):
        path = str(arguments.get("path") or ".")
    if elsewhere := _ELSEWHERE.match(path):
        # The sandbox may read it as another path than it is here.
        patterns = [pattern for pattern in patterns if pattern.startswith(elsewhere[0])]
    both = {_absolute(path), _absolute(path.rstrip())}
    known = [_absolute(pattern.replace("//", "/")) for pattern in patterns]
    return any(all(fnmatchcase(each, pattern) for each in both) for pattern in known)


def _lines(tool: str, given: Mapping[str, str]) -> tuple[str, ...]:
    """Return command lines that each do what the call does; none for what is no command."""
    if tool == "exec":
        return (given.get("command", ""),)
    if tool == "run_code":
        return _LANGUAGES.get(given.get("language", "python")) or (given.get("code", ""),)
    if tool == "delete_file":
        return (shlex.join(["rm", given.get("path", "")]),)
    if tool == "move_file":
        return (shlex.join(["mv", given.get("source", ""), given.get("destination", "")]),)
    return ()


def _line_matches(patterns: Sequence[str], line: str, may_write: Callable[[str], bool]) -> bool:
    if len(line) > _MOST_COMMAND:
        return False
    script = read_script(line)
    # Loops must set no variable that makes another program of a command, as PATH does.
    harmless = all(map(str.islower, script.set_variables))
    sets_what_runs = script.set_variables and not (harmless and not _EVALUATES.search(line))
    if script.cut or not script.commands or sets_what_runs:
        return False
    # Files that redirections write are not among a command's words, so they are checked here.
    writes = [path for path in script.writes if path not in _NOWHERE]
    moves = any(each.words[0] == "cd" for each in script.commands)
    known = not moves or all(path.startswith("/") for path in writes)
    if not known or not all(DYNAMIC not in path and may_write(path) for path in writes):
        return False
    commands = [each.words for each in script.commands if not _is_harmless(each.words)]
    return all(_command_matches(patterns, " ".join(words)) for words in commands)


def _is_harmless(words: Sequence[str]) -> bool:
    if words[0] in ("test", "["):
        return "-v" not in words
    if words[0] == "set":
        return all(_FLAG.fullmatch(word) for word in words[1:])
    return words[0] in _HARMLESS


def _command_matches(patterns: Sequence[str], command: str) -> bool:
    """Match by Claude's rules: `words:*` is a prefix, `*` any text, anything else the whole."""
    for pattern in patterns:
        beginning = pattern.removesuffix(":*").removesuffix(" *")
        if beginning != pattern and "*" not in beginning:
            if command == beginning or command.startswith(f"{beginning} "):
                return True
        elif fnmatchcase(command, pattern.replace(":*", "*")) and DYNAMIC not in command:
            return True
    return False


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join("/workspace", path))
