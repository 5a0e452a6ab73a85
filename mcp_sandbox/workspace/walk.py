"""Walks trees on the host by descriptor, while others change them, and measures them. Blocking.

No link is followed, no mount entered, and few directories are open however deep a tree is.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

from mcp_sandbox.workspace.beneath import grant_owner, open_directory

Checkpoint = Callable[[], None]
"""Called once per directory; raises to stop the walk."""
Visit = Callable[[int, os.DirEntry[str]], bool]
"""Takes an open directory and an entry of it; says whether to walk through that as a directory."""
Leave = Callable[[int, bytes], None]
"""Takes the parent and the name of a directory that the walk has been through."""

# Directories this near to the root stay open; deeper ones are left and found again through "..".
_KEPT_OPEN = 32
_MAX_OPENED_UP = 64
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
# A set of more inode numbers would cost the server too much memory; hard links beyond this many
# are counted each time, never too little.
_REMEMBERED_LINKS = 200_000


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
    """Return what unprivileged processes may still use on an open directory's file system."""
    status = os.statvfs(root)
    return FreeSpace(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


def measure(
    roots: Iterable[int],
    *,
    checkpoint: Checkpoint = lambda: None,
    max_entries: int = 5_000_000,
) -> Usage:
    """Return what the trees occupy in allocated blocks; each hard-linked file counts once.

    Whatever `checkpoint` raises passes through, except TimeoutError: that ends the walk with
    what was counted so far.
    """
    allocated = files = 0
    linked: set[tuple[int, int]] = set()

    def count(_directory: int, entry: os.DirEntry[str]) -> bool:
        nonlocal allocated, files
        status = entry.stat(follow_symlinks=False)
        if files >= max_entries:
            raise TimeoutError
        files += 1
        folder, identity = stat.S_ISDIR(status.st_mode), (status.st_dev, status.st_ino)
        if folder or status.st_nlink < 2 or identity not in linked:
            allocated += status.st_blocks * 512
            if not folder and status.st_nlink > 1 and len(linked) < _REMEMBERED_LINKS:
                linked.add(identity)
        return folder

    complete = True
    try:
        for root in roots:
            allocated += os.fstat(root).st_blocks * 512
            complete &= walk(root, count, checkpoint)
    except TimeoutError:
        complete = False
    return Usage(allocated, files, complete)


def walk(root: int, visit: Visit, checkpoint: Checkpoint, leave: Leave | None = None) -> bool:
    """Visit everything below an open directory; False when a part of it could not be seen.

    Whatever the callbacks raise ends the walk, except a FileNotFoundError of `visit`. A directory
    that its owner closed is opened up: for good if there is a `leave`, which may want to remove
    it, else until the walk leaves it.
    """
    with closing(_Descent(visit, leave)) as descent:
        descent.enter(os.dup(root), b"", None)
        while descent.levels:
            checkpoint()
            descent.step()
        return descent.complete


@dataclass
class _Level:
    """A directory on the way down. `closed_mode` is the mode to give back when we opened it up."""

    directory: int | None
    name: bytes
    identity: tuple[int, int]
    pending: list[str]
    closed_mode: int | None


class _Descent:
    """A depth-first walk that keeps a bounded number of directories open."""

    def __init__(self, visit: Visit, leave: Leave | None) -> None:
        self._visit = visit
        self._on_leaving = leave
        self.levels: list[_Level] = []
        self.complete = True
        self._opened_up = 0

    def step(self) -> None:
        """Enter the next directory here, or go back when there is none."""
        level = self.levels[-1]
        if not level.pending:
            return self._leave()
        assert level.directory is not None  # noqa: S101 - the deepest level is always open
        name = os.fsencode(level.pending.pop())
        try:
            child, closed_mode = self._open(level.directory, name)
        except OSError as exc:
            if exc.errno not in _VANISHED:
                self.complete = False
            return None
        self.enter(child, name, closed_mode)
        if len(self.levels) > _KEPT_OPEN + 1 and level.closed_mode is None:
            os.close(level.directory)
            level.directory = None
        return None

    def close(self) -> None:
        while self.levels:
            self._drop(self.levels.pop())

    def enter(self, directory: int, name: bytes, closed_mode: int | None) -> None:
        """Go down into an open directory, from here on the walk's, and visit its entries."""
        status = os.fstat(directory)
        level = _Level(directory, name, (status.st_dev, status.st_ino), [], closed_mode)
        self.levels.append(level)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if self._visit(directory, entry):
                            level.pending.append(entry.name)
        except PermissionError:
            self.complete = False

    def _open(self, parent: int, name: bytes) -> tuple[int, int | None]:
        """Open a directory; one that its owner closed to himself is opened up while we are in it.

        Without that, user code that runs with our uid could hide its files from the size limit.
        """
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        rights = 0o700 if self._on_leaving else 0o500
        usable = status.st_mode & rights == rights
        if usable or status.st_uid != os.geteuid() or self._opened_up >= _MAX_OPENED_UP:
            return open_directory(parent, name), None
        closed_mode = grant_owner(parent, name)
        directory = open_directory(parent, name)
        if self._on_leaving:
            return directory, None
        self._opened_up += 1
        return directory, closed_mode

    def _leave(self) -> None:
        """Go back to the parent; if the directory was moved away, to the nearest open one."""
        left = self.levels.pop()
        if self.levels and self.levels[-1].directory is None and left.directory is not None:
            self.levels[-1].directory = _parent(left.directory, self.levels[-1].identity)
        self._drop(left)
        if self._on_leaving and self.levels and self.levels[-1].directory is not None:
            self._on_leaving(self.levels[-1].directory, left.name)
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
