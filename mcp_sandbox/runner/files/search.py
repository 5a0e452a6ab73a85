"""Finds files by glob and lines by regular expression.

Both skip `.git` and the skills that the chat is shown unless the glob names them, look at hidden
files, follow no links and heed no ignore file. Lines are found by ripgrep where there is one, else
by Python, with equal results.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.alarm import TimeLimit, TimeUp
from mcp_sandbox.runner.files.listing import MAX_LIMIT, join, open_directory
from mcp_sandbox.runner.files.matches import Found, Query, shown_skills, usable, wanted
from mcp_sandbox.runner.files.paths import meant, relative, resolve
from mcp_sandbox.runner.files.reading import open_regular
from mcp_sandbox.runner.files.walk import Budget, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.files.call import Call

SECONDS = 10.0


def glob(call: Call) -> dict[str, Any]:
    """Send the paths of the files whose path matches a glob, newest first."""
    # Only searches need regular expressions, and they take some milliseconds to import.
    from mcp_sandbox.runner.files import globs  # noqa: PLC0415

    base, pattern = globs.placed(meant(call.text("pattern")), resolve(call.text("path", ".")))
    pattern = globs.normalize(pattern, base)
    limit = call.number("limit", 500, low=1, high=MAX_LIMIT)
    budget = Budget(seconds=SECONDS)
    names = wanted(git=globs.names_git(pattern), skills=shown_skills(base, pattern))
    found = _matching(base, globs.compile_glob(pattern), budget, names)
    found.sort(key=lambda row: (-row[0], row[1]))
    sent = pipes.put_rows(call.stdout, (relative(join(base, path)) for _, path in found), limit)
    return {"total": len(found), "truncated": budget.cut or len(found) > sent}


def grep(call: Call) -> dict[str, Any]:
    """Send `file:line:text` of the lines that a regular expression matches, by path and line."""
    from mcp_sandbox.runner.files import ripgrep, scan  # noqa: PLC0415

    query = _query(call)
    found = Found(query.limit, query.context)
    try:
        with TimeLimit(SECONDS):
            if not ripgrep.search(query, found):
                scan.search(query, found)
    except TimeUp:
        found.truncated = True
    pipes.put(call.stdout, found.body())
    return {"matches": found.matches, "files": found.files, "truncated": found.truncated}


def _query(call: Call) -> Query:
    from mcp_sandbox.runner.files.globs import normalize, placed  # noqa: PLC0415

    path = resolve(call.text("path", "."))
    base, only = (path, "") if os.path.isdir(path) else os.path.split(os.path.realpath(path))
    if only:
        os.close(open_regular(path)[0])
    glob_text = meant(call.text("glob", ""))
    if not only:
        path, glob_text = placed(glob_text, path)
        base = path
    return Query(
        pattern=usable(call.text("pattern")),
        shown=path,
        base=base,
        only=only,
        glob=normalize(glob_text, base) if glob_text and not only else "",
        ignore_case=call.flag("ignore_case"),
        context=call.number("context", 0, high=50),
        limit=call.number("limit", 200, low=1, high=100_000),
    )


def _matching(
    base: str, matches: Callable[[str], bool], budget: Budget, names: Callable[[str], bool]
) -> list[tuple[int, str]]:
    """Time of change and path of what is no directory and matches."""
    found: list[tuple[int, str]] = []
    try:
        with TimeLimit(SECONDS):
            for path, entry, _ in walk(open_directory(base), 100_000, budget, names):
                if not entry.is_dir(follow_symlinks=False) and matches(path):
                    found += _dated(path, entry)
    except TimeUp:
        budget.spend()
    return found


def _dated(path: str, entry: os.DirEntry[str]) -> list[tuple[int, str]]:
    try:
        return [(entry.stat(follow_symlinks=False).st_mtime_ns, path)]
    except OSError:
        return []
