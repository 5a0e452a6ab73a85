"""How much a tree occupies, measured on the host while others change it."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from mcp_sandbox.workspace.beneath import grant_owner, open_directory

Checkpoint = Callable[[], None]
"""Called once per directory; raises to stop the walk."""

# Directories this near to the root stay open; deeper ones are left and found again through "..".
_KEPT_OPEN = 32
_MAX_OPENED_UP = 64
# A set of more inode numbers would cost the server too much memory; hard links beyond this many
# are counted each time, never too little.
_REMEMBERED_LINKS = 200_000
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})


class TooManyEntries(Exception):
    """The walk met more entries than it was allowed to."""


@dataclass(frozen=True)
class Usage:
    """`files` counts everything but the roots; not `complete` means that there is more."""

    allocated_bytes: int
    files: int
    complete: bool = True


@dataclass(frozen=True)
class FreeSpace:
    """What the file system has left; `files` is None where it sets no limit.

    `allowed_bytes` is what the chat may hold in all for its user to stay within the quota.
    """

    free_bytes: int
    files: int | None
    allowed_bytes: int | None = None


def free_space(root: int) -> FreeSpace:
    """What is left for an unprivileged process on the file system of an open directory."""
    status = os.statvfs(root)
    files = status.f_favail if status.f_files else None
    return FreeSpace(status.f_bavail * status.f_frsize, files)


def measure(
    roots: Iterable[int],
    *,
    checkpoint: Checkpoint = lambda: None,
    max_entries: int = 5_000_000,
) -> Usage:
    """What the trees occupy by allocated blocks; each hard-linked file counts once.

    Follows no links, enters no mounts, and needs few descriptors however deep the tree is.
    Whatever `checkpoint` raises passes through, except TimeoutError: that ends the walk with
    what was counted so far.
    """
    count = _Count(max_entries)
    complete = True
    for root in roots:
        try:
            complete &= _walk(root, count, checkpoint)
        except (TimeoutError, TooManyEntries):
            complete = False
            break
    return Usage(count.allocated_bytes, count.files, complete)


class _Count:
    def __init__(self, max_entries: int) -> None:
        self.allocated_bytes = 0
        self.files = 0
        self._max_entries = max_entries
        self._linked: set[tuple[int, int]] = set()

    def list(self, directory: int) -> list[str]:
        """Count what is in a directory; returns the names of the directories in it."""
        directories: list[str] = []
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    self.add(status)
                    if stat.S_ISDIR(status.st_mode):
                        directories.append(entry.name)
        return directories

    def add(self, status: os.stat_result) -> None:
        if self.files >= self._max_entries:
            raise TooManyEntries
        self.files += 1
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            identity = (status.st_dev, status.st_ino)
            if identity in self._linked:
                return
            if len(self._linked) < _REMEMBERED_LINKS:
                self._linked.add(identity)
        self.allocated_bytes += status.st_blocks * 512


@dataclass
class _Level:
    """A directory on the way down. `closed_mode` is the mode to give back when we opened it up."""

    directory: int | None
    identity: tuple[int, int]
    pending: list[str]
    closed_mode: int | None = None


def _walk(root: int, count: _Count, checkpoint: Checkpoint) -> bool:
    """Count a tree; False when a part of it could not be seen."""
    count.allocated_bytes += os.fstat(root).st_blocks * 512
    descent = _Descent(count)
    try:
        descent.enter(os.dup(root), None)
        while descent.levels:
            checkpoint()
            descent.step()
    finally:
        descent.close()
    return descent.complete


class _Descent:
    """A depth-first walk that keeps a bounded number of directories open."""

    def __init__(self, count: _Count) -> None:
        self._count = count
        self.levels: list[_Level] = []
        self.complete = True
        self._opened_up = 0

    def step(self) -> None:
        """Enter the next directory here, or go back when there is none."""
        level = self.levels[-1]
        if not level.pending:
            return self._leave()
        if level.directory is None:
            raise AssertionError("the deepest level is always open")
        try:
            child, closed_mode = self._open(level.directory, os.fsencode(level.pending.pop()))
        except OSError as exc:
            if exc.errno not in _VANISHED:
                self.complete = False
            return None
        self.enter(child, closed_mode)
        if len(self.levels) > _KEPT_OPEN + 1 and level.closed_mode is None:
            os.close(level.directory)
            level.directory = None
        return None

    def close(self) -> None:
        while self.levels:
            self._drop(self.levels.pop())

    def enter(self, directory: int, closed_mode: int | None) -> None:
        """Go down into an open directory, which is ours from here on, and count what is in it."""
        status = os.fstat(directory)
        level = _Level(directory, (status.st_dev, status.st_ino), [], closed_mode)
        self.levels.append(level)
        try:
            level.pending = self._count.list(directory)
        except PermissionError:
            self.complete = False

    def _open(self, parent: int, name: bytes) -> tuple[int, int | None]:
        """Open a directory; one that its owner closed to himself is opened up while we are in it.

        Without that, user code that runs with our uid could hide its files from the size limit.
        """
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        readable = status.st_mode & 0o500 == 0o500
        if readable or status.st_uid != os.geteuid() or self._opened_up >= _MAX_OPENED_UP:
            return open_directory(parent, name), None
        closed_mode = grant_owner(parent, name)
        directory = open_directory(parent, name)
        self._opened_up += 1
        return directory, closed_mode

    def _leave(self) -> None:
        """Back to the parent; if the directory was moved away, to the nearest one still open."""
        left = self.levels.pop()
        if self.levels and self.levels[-1].directory is None and left.directory is not None:
            self.levels[-1].directory = _parent(left.directory, self.levels[-1].identity)
        self._drop(left)
        while self.levels and self.levels[-1].directory is None:
            self.complete = False
            self.levels.pop()

    def _drop(self, level: _Level) -> None:
        if level.directory is None:
            return
        if level.closed_mode is not None:
            self._opened_up -= 1
            os.fchmod(level.directory, level.closed_mode)
        os.close(level.directory)


def _parent(directory: int, identity: tuple[int, int]) -> int | None:
    """Open ".." if it is still the directory we came from."""
    try:
        parent = os.open(b"..", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None
    status = os.fstat(parent)
    if (status.st_dev, status.st_ino) == identity:
        return parent
    os.close(parent)
    return None
