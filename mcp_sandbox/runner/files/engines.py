"""Finds lines, by ripgrep where it is installed, else by Python, with equal results."""

from __future__ import annotations

import os
import re
import signal
import stat
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.call import chunks, closing_fd
from mcp_sandbox.runner.files.paths import TEMPORARY
from mcp_sandbox.runner.files.reading import split
from mcp_sandbox.runner.files.search import compile_glob, names_git, wanted
from mcp_sandbox.runner.files.walk import Budget, open_directory, walk
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mcp_sandbox.runner.files.search import Found, Query

# Globs that ripgrep reads as `compile_glob` does.
_SAME_IN_RIPGREP = re.compile(r"(?!!)(?:[\w\-. +@%=,/*]|\{[\w\-. +@%=,*]*\})+", re.ASCII)
# Not PATH: that begins in the home, where the chat could put its own program.
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")
_LONGEST = 4 * 1024 * 1024
# A line of ripgrep's output with its path; the rest of a longer one is dropped.
_LONGEST_RECORD = _LONGEST + 8192
_HEAD = 64 * 1024
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_BINARY = b": WARNING: stopped searching binary file after match"
_FLAGS = [
    *("--no-config", "--color=never", "--no-heading", "--with-filename", "--line-number"),
    *("--column", "--null", "--sort=path", "--hidden", "--no-ignore", "--no-messages"),
    *("--no-mmap", "--crlf", "--encoding=none"),
]


def by_ripgrep(query: Query, found: Found) -> bool:
    """Add matches to `found`; return False if ripgrep is absent or cannot do this query."""
    program = _program()
    literal = f"/{query.only}" if query.only else query.glob
    if not program or "*" in query.only or "***" in literal:
        return False
    if literal and not _SAME_IN_RIPGREP.fullmatch(literal):
        return False
    with closing_fd(os.memfd_create("complaints")) as complaints:
        _run([program, *_arguments(query)], query, found, complaints)
        return found.matches > 0 or os.fstat(complaints).st_size == 0


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
    return [*flags, f"--regexp={query.pattern}", "--", "./"]


def _run(argv: list[str], query: Query, found: Found, complaints: int) -> None:
    output, theirs = os.pipe()
    with closing_fd(output):
        with closing_fd(theirs):
            pid = _spawn(argv, query.base, theirs, complaints)
        try:
            _collect(output, query, found)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spawn(argv: list[str], base: str, output: int, complaints: int) -> int:
    """Start it in `base`, as its globs are relative to its working directory."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, complaints, 2),
    ]
    env = {"PATH": ":".join(FOLDERS), "LANG": "C.UTF-8"}
    how: dict[str, Any] = {"file_actions": actions, "setsigdef": [signal.SIGPIPE]}
    with closing_fd(open_directory(".")) as here:
        os.chdir(base)
        try:
            return os.posix_spawn(argv[0], argv, env, **how)
        finally:
            os.fchdir(here)


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
    """Yield path and rest of each line; None as rest means that the file is binary after all."""
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
    for chunk in chunks(output):
        first, *others = chunk.split(b"\n")
        start += first[: _LONGEST_RECORD - len(start)]
        for line in others:
            yield start
            start = line[:_LONGEST_RECORD]


def by_python(query: Query, found: Found) -> None:
    """Add matches to `found`; raise OpError if the pattern is no regular expression."""
    try:
        # Warnings are about the pattern's meaning in later versions of Python.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pattern = re.compile(query.pattern, re.IGNORECASE if query.ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as exc:
        raise OpError(
            "invalid",
            f"the pattern is no regular expression: {exc}. Escape characters that are meant "
            "literally with a backslash",
        ) from exc
    budget = Budget()
    for path in [query.only] if query.only else _files(query, budget):
        if not _search_file(query, path, pattern, found):
            return
    found.truncated = found.truncated or budget.cut


def _files(query: Query, budget: Budget) -> list[str]:
    """Return the files to search, in the order of ripgrep."""
    matches: Callable[[str], bool] = compile_glob(query.glob) if query.glob else lambda _: True
    found = walk(open_directory(query.base), 100_000, budget, wanted(query.glob))
    paths = [p for p, entry, _ in found if entry.is_file(follow_symlinks=False) and matches(p)]
    return sorted(paths, key=lambda path: os.fsencode(path).split(b"/"))


def _search_file(query: Query, path: str, pattern: re.Pattern[str], found: Found) -> bool:
    """Search a file; return False when no more lines are wanted."""
    try:
        fd = os.open(f"{query.base}/{path}", _OPEN)
    except OSError:
        # As ripgrep does: a file that is gone or may not be read has no lines.
        return True
    with closing_fd(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode) or b"\0" in os.pread(fd, _HEAD, 0):
            return True
        name = query.name(path)
        for row in _rows(fd, pattern, query.context):
            if row is None:
                found.drop(name)
                return True
            if not found.add(name, *row):
                return False
        return True


def _rows(fd: int, pattern: re.Pattern[str], context: int) -> Iterator[tuple[int, str, int] | None]:
    """Yield number, text, column of matches and their `context`; None if the file is binary."""
    before: deque[tuple[int, str, int]] = deque(maxlen=context)
    after = 0
    for number, line in enumerate(split(fd, 0, _LONGEST), 1):
        if b"\0" in line.head:
            yield None
            return
        text = line.head.decode("utf-8", "surrogateescape").removesuffix("\r")
        match = pattern.search(text)
        row = number, text, match.start() + 1 if match else 0
        if match:
            yield from before
            before.clear()
            after = context
            yield row
        elif after:
            after -= 1
            yield row
        else:
            before.append(row)
