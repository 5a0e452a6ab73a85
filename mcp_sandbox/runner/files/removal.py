"""Deletes files and trees: follows no link, survives any depth, hostile names and company."""

from __future__ import annotations

import errno
import os
import os.path
import stat
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.paths import protect, relative, resolve, show
from mcp_sandbox.runner.files.walk import Descent, kind_of
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.files.call import Call

# How often a directory that others keep filling is emptied again before giving up.
_ROUNDS = 20


def delete(call: Call) -> dict[str, Any]:
    """Remove a file, a link itself, an empty directory, or with `recursive` a whole tree."""
    path = resolve(call.text("path"))
    protect(path, "deleted")
    found = os.lstat(path)
    shown = relative(path)
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(path)
        entries = 1
    elif call.flag("recursive"):
        entries = remove_tree(path)
    else:
        _remove_empty(path)
        entries = 1
    return {"path": shown, "kind": kind_of(found.st_mode), "entries": entries}


def _remove_empty(path: str) -> None:
    with os.scandir(path) as found:
        if next(found, None) is not None:
            raise OpError(
                "wrong_kind",
                f"{show(path)} is a directory that is not empty: pass recursive=true to delete "
                "it with everything in it",
            )
    os.rmdir(path)


def remove_tree(path: str) -> int:
    """Remove a directory with everything in it; returns how many entries that were."""
    head, name = os.path.split(path)
    removal = _Removal(os.open(head, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        removal.enter(name)
        while removal.levels:
            removal.step()
    except OSError as exc:
        where = "/".join(level.name for level in removal.levels)
        exc.filename = os.path.join(head, where)
        raise
    finally:
        removal.close()
    return removal.removed


class _Level:
    """A directory that is being emptied: its name and the directories still in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directories: list[str] = []
        self.rounds = 0


class _Removal:
    """Where a removal is and how much it removed. Works on the directory below `root`."""

    def __init__(self, root: int) -> None:
        self._descent = Descent(root)
        self.levels: list[_Level] = []
        self.removed = 0

    def close(self) -> None:
        self._descent.close()

    def enter(self, name: str) -> None:
        """Go into a directory and remove what is no directory there."""
        try:
            self._descent.down(name)
        except OSError as exc:
            # Gone or replaced by now: the check of the directory above sees what is left.
            if self.levels and exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise
        self.levels.append(_Level(name))
        self._sweep()

    def step(self) -> None:
        """Go into the next directory, or leave and remove the one where we are."""
        level = self.levels[-1]
        if level.directories:
            self.enter(level.directories.pop())
            return
        self._descent.up()
        try:
            self.removed += _gone(os.rmdir, level.name, self._descent.fd)
            self.levels.pop()
        except OSError as exc:
            level.rounds += 1
            if exc.errno != errno.ENOTEMPTY or level.rounds > _ROUNDS:
                raise
            self._descent.down(level.name)
            self._sweep()

    def _sweep(self) -> None:
        with os.scandir(self._descent.fd) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.levels[-1].directories.append(entry.name)
            else:
                self.removed += _gone(os.unlink, entry.name, self._descent.fd)


def _gone(remove: Callable[..., None], name: str, directory: int) -> int:
    """Remove a name; returns 0 when it was gone already or became a directory meanwhile."""
    try:
        remove(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    return 1
