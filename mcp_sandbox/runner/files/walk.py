"""Walks directory trees by file descriptor. No link is followed, but those that a caller enters.

Nothing recurses and no path is built for the kernel, so trees deeper than PATH_MAX work.
"""

from __future__ import annotations

import os
import stat
from contextlib import closing, suppress
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING

from mcp_sandbox.runner.files.paths import show
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Test = Callable[[str], bool]
    Enters = Callable[[str, os.DirEntry[str]], bool]
    # A path with a slash, and the directories there that are still to be entered: links, or not.
    _Level = tuple[str, list[tuple[str, bool]]]

MAX_LIMIT = 100_000
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEEP_OPEN = 128
# Far above what the kernel takes as a path, and small enough to keep for each level.
_MAX_PREFIX = 16 * 1024

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


def kind_of(mode: int) -> str:
    """Return the word for a file's type."""
    return _KINDS.get(stat.S_IFMT(mode), "device")


class Descent:
    """The directories from a root to the current one. Deep ones are closed and reopened by "..".

    Takes over `root`, an open directory.
    """

    def __init__(self, root: int) -> None:
        self._fds: list[int] = [root]
        self._identities = [_identity(root)]

    @property
    def fd(self) -> int:
        return self._fds[-1]

    def down(self, name: str, *, linked: bool = False) -> None:
        """Enter a directory, or with `linked` where a link leads; OSError if that cannot be."""
        # A link that leads back is entered once, as `*/this/*.js` may mean just that.
        fd = os.open(name, OPEN_DIRECTORY & ~(linked * os.O_NOFOLLOW), dir_fd=self.fd)
        if linked and self._identities.count(_identity(fd)) > 1:
            os.close(fd)
            raise OSError(f"{name} leads back in a circle")
        self._fds.append(fd)
        self._identities.append(_identity(fd))
        stale = len(self._fds) - _KEEP_OPEN
        if stale > 0 and self._fds[stale] >= 0:
            os.close(self._fds[stale])
            self._fds[stale] = -1

    def up(self) -> None:
        """Return to the directory above; OSError if it is not where it was."""
        if self._fds[-2] < 0:
            above = os.open("..", OPEN_DIRECTORY, dir_fd=self.fd)
            if _identity(above) != self._identities[-2]:
                os.close(above)
                raise OSError(
                    f"a directory moved while it was read: {len(self._fds) - 1} levels down"
                )
            self._fds[-2] = above
        os.close(self._fds.pop())
        self._identities.pop()

    def close(self) -> None:
        while self._fds:
            fd = self._fds.pop()
            if fd >= 0:
                os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


class Budget:
    """A limit on what is read of a tree: `spent` ends the walk, `cut` says there was more."""

    def __init__(self) -> None:
        self._left = 200_000
        self._end = monotonic() + 10.0
        self.spent = False
        self.cut = False

    def spend(self) -> None:
        self.spent = self.cut = True

    def take(self) -> bool:
        """Count one entry; return whether it may be read."""
        self._left -= 1
        if self._left < 0 or (self._left % 256 == 0 and monotonic() > self._end):
            self.spend()
        return not self.spent


def _is_folder(_path: str, entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def walk(
    root: int, depth: int, budget: Budget, wanted: Test, enters: Enters = _is_folder
) -> Iterator[tuple[str, os.DirEntry[str], int]]:
    """Yield path, entry and open directory of all entries up to `depth` levels below `root`.

    Entries whose path is not `wanted` are skipped with all their content. What is in folders, or
    behind links, is walked if it `enters` them. Takes over `root`, an open directory. An entry is
    valid until the next one is asked for. What cannot be read or vanishes is left out.
    """
    pending: list[_Level] = []
    prefix = ""
    with closing(Descent(root)) as descent:
        while True:
            directories: list[tuple[str, bool]] = []
            deeper = len(pending) + 1 < depth
            for entry in _entries(descent.fd, budget):
                path = prefix + entry.name
                if wanted(path):
                    yield path, entry, descent.fd
                    if deeper and enters(path, entry):
                        directories.append((entry.name, entry.is_symlink()))
            pending.append((prefix, directories))
            found = _next_directory(descent, pending, budget)
            if found is None:
                return
            prefix = found


def _entries(fd: int, budget: Budget) -> Iterator[os.DirEntry[str]]:
    with suppress(PermissionError), os.scandir(fd) as found:
        yield from takewhile(lambda _: budget.take(), found)


def _next_directory(descent: Descent, pending: list[_Level], budget: Budget) -> str | None:
    """Enter the next directory; return its path with a slash, None at the end."""
    while pending and not budget.spent:
        prefix, names = pending[-1]
        if names and len(prefix) > _MAX_PREFIX:
            names.clear()
            budget.cut = True
        elif names:
            name, linked = names.pop()
            try:
                descent.down(name, linked=linked)
            except OSError:
                continue
            return f"{prefix}{name}/"
        else:
            pending.pop()
            try:
                if pending:
                    descent.up()
            except OSError:
                budget.spend()
    return None


def open_directory(path: str) -> int:
    """Open a directory, through links; raise OpError if it is a file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as exc:
        raise OpError(
            "wrong_kind", f"{show(path)} is not a directory: use read_file to see a file"
        ) from exc


def join(base: str, name: str) -> str:
    """Return `name` beneath `base`, which may be "/"."""
    return f"{base.rstrip('/')}/{name}"
