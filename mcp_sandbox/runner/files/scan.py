"""Finds lines with Python's own regular expressions, where there is no ripgrep."""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mcp_sandbox.runner.files.globs import compile_glob, names_git
from mcp_sandbox.runner.files.lines import split
from mcp_sandbox.runner.files.listing import open_directory
from mcp_sandbox.runner.files.matches import shown_skills, wanted
from mcp_sandbox.runner.files.walk import Budget, walk
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mcp_sandbox.runner.files.matches import Found, Query

_LONGEST = 4 * 1024 * 1024
_HEAD = 64 * 1024
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class _Row(NamedTuple):
    number: int
    text: str
    column: int


def search(query: Query, found: Found) -> None:
    """Add what matches to `found`.

    Raises:
        OpError: the pattern is no regular expression.
    """
    pattern = _compile(query)
    budget = Budget()
    for path in [query.only] if query.only else _files(query, budget):
        if not _search_file(query, path, pattern, found):
            return
    found.truncated = found.truncated or budget.cut


def _compile(query: Query) -> re.Pattern[str]:
    try:
        # A warning is about the meaning of the pattern in later versions of Python.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(query.pattern, re.IGNORECASE if query.ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as exc:
        raise OpError(
            "invalid",
            f"the pattern is no regular expression: {exc}. Escape characters that are meant "
            "literally with a backslash",
        ) from exc


def _files(query: Query, budget: Budget) -> list[str]:
    """The files to look into, in the order in which ripgrep sorts them."""
    matches: Callable[[str], bool] = compile_glob(query.glob) if query.glob else lambda _: True
    skills = shown_skills(query.base, query.glob)
    names = wanted(git=names_git(query.glob), skills=skills)
    found = walk(open_directory(query.base), 100_000, budget, names)
    paths = [p for p, entry, _ in found if entry.is_file(follow_symlinks=False) and matches(p)]
    return sorted(paths, key=lambda path: os.fsencode(path).split(b"/"))


def _search_file(query: Query, path: str, pattern: re.Pattern[str], found: Found) -> bool:
    """False when no more lines are wanted."""
    try:
        fd = os.open(f"{query.base}/{path}", _OPEN)
    except OSError:
        # As ripgrep does: what may not be read or is gone by now has no lines.
        return True
    try:
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
    finally:
        os.close(fd)


def _rows(fd: int, pattern: re.Pattern[str], context: int) -> Iterator[_Row | None]:
    """The matching lines with `context` lines around; None when the file turns out binary."""
    before: deque[_Row] = deque(maxlen=context)
    after = 0
    for number, line in enumerate(split(fd, 0, _LONGEST), 1):
        if b"\0" in line.head:
            yield None
            return
        text = line.head.decode("utf-8", "surrogateescape").removesuffix("\r")
        match = pattern.search(text)
        row = _Row(number, text, match.start() + 1 if match else 0)
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
