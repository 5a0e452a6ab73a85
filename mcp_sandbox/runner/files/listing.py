"""Lists directories and describes single files."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.paths import relative, resolve, show
from mcp_sandbox.runner.files.walk import Budget, kind_of, walk
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Call

MAX_LIMIT = 100_000


def list_directory(call: Call) -> dict[str, Any]:
    """Send [path, kind, size, modified, target] of what a directory holds, sorted by path."""
    path = resolve(call.text("path", "."))
    depth = call.number("depth", 1, low=1, high=10_000)
    limit = call.number("limit", 500, low=1, high=MAX_LIMIT)
    hidden = call.flag("hidden", default=True)
    budget = Budget()
    found = walk(
        open_directory(path),
        depth,
        budget,
        lambda found: hidden or not found.rpartition("/")[2].startswith("."),
    )
    rows = [row for row in map(_describe, found) if row]
    rows.sort(key=lambda row: row[0])
    named = ([relative(join(path, row[0])), *row[1:]] for row in rows)
    sent = pipes.put_rows(call.stdout, named, limit)
    truncated = budget.cut or len(rows) > sent
    return {"path": relative(path), "total": len(rows), "truncated": truncated}


def stat_path(call: Call) -> dict[str, Any]:
    """Say what is at a path; a link is not followed."""
    path = resolve(call.text("path"))
    found = os.lstat(path)
    return {
        "path": relative(path),
        "kind": kind_of(found.st_mode),
        "size": found.st_size,
        "modified": found.st_mtime,
        "mode": stat.S_IMODE(found.st_mode),
    }


def open_directory(path: str) -> int:
    """An open directory; a link to one is followed.

    Raises:
        OpError: it is a file.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as exc:
        raise OpError(
            "wrong_kind", f"{show(path)} is not a directory: use read_file to see a file"
        ) from exc


def join(base: str, name: str) -> str:
    """`name` beneath `base`, which may be "/"."""
    return f"{base.rstrip('/')}/{name}"


def _describe(found: tuple[str, os.DirEntry[str], int]) -> list[Any] | None:
    """A row of the listing, None when the entry vanished or may not be looked at."""
    name, entry, directory = found
    try:
        facts = entry.stat(follow_symlinks=False)
        target = show(os.readlink(entry.name, dir_fd=directory)) if entry.is_symlink() else None
    except OSError:
        return None
    return [name, kind_of(facts.st_mode), facts.st_size, facts.st_mtime, target]
