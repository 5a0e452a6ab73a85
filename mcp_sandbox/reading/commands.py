"""Words of commands: wrappers such as `sudo`, and the program that they run. Pure."""

import re
from itertools import dropwhile


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


DYNAMIC = "\0"
"""Stands in a text for a part that is known only when the script runs."""

# Programs that run the rest of their line; the number of own arguments after the options.
WRAPPERS = {
    "sudo": 0, "env": 0, "nohup": 0, "exec": 0, "command": 0, "builtin": 0, "time": 0, "nice": 0,
    "xargs": 0, "timeout": 1, "stdbuf": 0, "setsid": 0, "watch": 0, "doas": 0, "ionice": 0,
    "then": 0, "do": 0, "else": 0, "busybox": 0, "toybox": 0, "chroot": 1, "flock": 1, "chrt": 1,
    "taskset": 1, "fakeroot": 0, "unshare": 0, "strace": 0, "parallel": 0, "pkexec": 0,
}  # fmt: skip
# Options of the wrappers that take the next word.
_TAKES_WORD = {
    "sudo": {"-u", "-g", "-C", "-D", "-h", "-p", "--user", "--group"},
    "env": {"-u", "-C", "--unset", "--chdir"},
    "nice": {"-n"}, "timeout": {"-s", "-k", "--signal", "--kill-after"}, "watch": {"-n"},
    "xargs": {"-n", "-I", "-P", "-L", "-d", "-E", "-s", "-a"}, "stdbuf": {"-i", "-o", "-e"},
    "ionice": {"-c", "-n", "-p"}, "exec": {"-a"}, "time": {"-f", "-o"}, "strace": {"-o", "-e"},
    "flock": {"-w", "-E"}, "parallel": {"-j"}, "doas": {"-u", "-C"},
}  # fmt: skip
_FD = names("-x -X --exec --exec-batch")
_EXECUTES = {"find": names("-exec -execdir -ok -okdir"), "fd": _FD, "fdfind": _FD}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)


def drop_assignments(words: list[str]) -> list[str]:
    """Return the words of a command without the variables that are set for it."""
    return list(dropwhile(_ASSIGNMENT.fullmatch, words))


def unwrap_command(program: str, words: list[str]) -> list[str]:
    """Return the command that a wrapper, `find` or `fd` runs; `words` stand after its name."""
    if executes := _EXECUTES.get(program):
        return list(dropwhile(lambda word: word not in executes, words))[1:]
    if program not in WRAPPERS or (program == "command" and words[:1] in (["-v"], ["-V"])):
        return []
    at, takes = 0, _TAKES_WORD.get(program, ())
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in takes else 1
    return drop_assignments(words[at:])[WRAPPERS[program] :]
