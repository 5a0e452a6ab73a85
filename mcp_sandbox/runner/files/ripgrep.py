"""Finds lines with ripgrep, made to agree with scan.py."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.globs import names_git, same_in_ripgrep
from mcp_sandbox.runner.files.matches import shown_skills
from mcp_sandbox.runner.files.paths import TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mcp_sandbox.runner.files.matches import Found, Query

# Not PATH: that begins in the home, where a program of the chat would answer for ours.
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")
# Longer ones are of a line whose end nobody sees: as scan.py, and a path.
_LONGEST = 4 * 1024 * 1024 + 8192
_BINARY = b": WARNING: stopped searching binary file after match"
_FLAGS = [
    *("--no-config", "--color=never", "--no-heading", "--with-filename", "--line-number"),
    *("--column", "--null", "--sort=path", "--hidden", "--no-ignore", "--no-messages"),
    *("--no-mmap", "--crlf", "--encoding=none"),
]


def search(query: Query, found: Found) -> bool:
    """Add what matches to `found`; False when ripgrep is absent or cannot do this query."""
    program = _program()
    literal = f"/{query.only}" if query.only else query.glob
    if not program or (literal and not same_in_ripgrep(literal)) or "*" in query.only:
        return False
    complaints = os.memfd_create("complaints")
    try:
        _run([program, *_arguments(query)], query, found, complaints)
        return found.matches > 0 or os.fstat(complaints).st_size == 0
    finally:
        os.close(complaints)


def _program() -> str | None:
    programs = (os.path.join(folder, "rg") for folder in FOLDERS)
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def _arguments(query: Query) -> list[str]:
    flags = [*_FLAGS, f"--context={query.context}"]
    if query.ignore_case:
        flags.append("--ignore-case")
    if query.only:
        flags += ["--max-depth=1", f"--glob=/{query.only}"]
    elif query.glob:
        flags.append(f"--glob={query.glob}")
    if not query.only and not names_git(query.glob):
        flags.append("--glob=!.git")
    if not query.only:
        flags.append(f"--glob=!{TEMPORARY}*")
        if skills := shown_skills(query.base, query.glob):
            flags.append(f"--glob=!/{skills}")
    return [*flags, f"--regexp={query.pattern}", "--", "./"]


def _run(argv: list[str], query: Query, found: Found, complaints: int) -> None:
    output, theirs = os.pipe()
    pid = 0
    try:
        try:
            pid = _spawn(argv, query.base, theirs, complaints)
        finally:
            os.close(theirs)
        _collect(output, query, found)
    finally:
        os.close(output)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spawn(argv: list[str], base: str, output: int, complaints: int) -> int:
    """Start it in `base`: its globs are relative to where it runs."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, complaints, 2),
    ]
    env = {"PATH": ":".join(FOLDERS), "LANG": "C.UTF-8"}
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(base)
        return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGPIPE])
    finally:
        os.fchdir(here)
        os.close(here)


def _collect(output: int, query: Query, found: Found) -> None:
    for path, rest in _records(output):
        name = query.name(os.fsdecode(path).removeprefix("./"))
        if rest is None:
            found.drop(name)
            continue
        digits = len(rest) - len(rest.lstrip(b"0123456789"))
        number, column, text = int(rest[:digits]), 0, rest[digits + 1 :]
        if rest[digits : digits + 1] == b":":
            at, _, text = text.partition(b":")
            column = 1 + len(text[: int(at) - 1].decode("utf-8", "surrogateescape"))
        if not found.add(name, number, text.decode("utf-8", "surrogateescape"), column):
            return


def _records(output: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Path and rest of each line; None as rest says that the file is binary after all."""
    start = b""
    for line in _lines(output):
        path, nul, rest = (start + line).partition(b"\0")
        start = b""
        if nul:
            yield path, rest
        elif _BINARY in path:
            yield path[: path.rindex(_BINARY)], None
        elif path.rstrip(b"\r") != b"--":
            # The name of the file holds a line break.
            start = path + b"\n"


def _lines(output: int) -> Iterator[bytes]:
    start = b""
    for chunk in pipes.chunks(output):
        first, *others = chunk.split(b"\n")
        start += first[: _LONGEST - len(start)]
        for line in others:
            yield start
            start = line[:_LONGEST]
