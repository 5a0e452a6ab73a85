"""Copies files and trees as they are: links as links, holes as holes, mode and time kept."""

from __future__ import annotations

import errno
import os
import os.path
import stat

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.paths import show
from mcp_sandbox.runner.files.walk import Descent, kind_of
from mcp_sandbox.runner.protocol import OpError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def copy_tree(source: str, target: str) -> None:
    """Copy what is at `source` to the new name `target`. A failed copy stays for the caller.

    Raises:
        OpError: a socket or device is in it.
    """
    above = _open_above(source), _open_above(target)
    copying = _Copying(*above)
    try:
        copying.copy(os.path.basename(source), os.path.basename(target))
        while copying.levels:
            copying.step()
    finally:
        copying.close()


def _open_above(path: str) -> int:
    return os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class _Copying:
    """Two descents side by side. `levels` hold the entries still to be copied at each depth."""

    def __init__(self, source: int, target: int) -> None:
        self._source = Descent(source)
        self._target = Descent(target)
        self.levels: list[list[str]] = []

    def close(self) -> None:
        self._source.close()
        self._target.close()

    def step(self) -> None:
        """Copy the next entry, or leave the directory where we are."""
        if self.levels[-1]:
            name = self.levels[-1].pop()
            self.copy(name, name)
            return
        # Only now: entries made in it would change its time, and a read-only mode forbid them.
        found = os.fstat(self._source.fd)
        os.fchmod(self._target.fd, stat.S_IMODE(found.st_mode))
        os.utime(self._target.fd, ns=(found.st_atime_ns, found.st_mtime_ns))
        self._source.up()
        self._target.up()
        self.levels.pop()

    def copy(self, name: str, new: str) -> None:
        """Copy an entry; of a directory, itself and then by further steps what it holds."""
        found = os.stat(name, dir_fd=self._source.fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            self._enter(name, new)
        elif stat.S_ISREG(found.st_mode):
            self._copy_file(name, new)
        elif stat.S_ISLNK(found.st_mode):
            text = os.readlink(name, dir_fd=self._source.fd)
            os.symlink(text, new, dir_fd=self._target.fd)
        elif stat.S_ISFIFO(found.st_mode):
            os.mkfifo(new, stat.S_IMODE(found.st_mode), dir_fd=self._target.fd)
        else:
            raise OpError(
                "unsupported",
                f"{show(name)} is a {kind_of(found.st_mode)}, which cannot be moved to another "
                "file system: delete it first",
            )
        if not stat.S_ISDIR(found.st_mode):
            times = (found.st_atime_ns, found.st_mtime_ns)
            os.utime(new, ns=times, dir_fd=self._target.fd, follow_symlinks=False)

    def _enter(self, name: str, new: str) -> None:
        os.mkdir(new, 0o700, dir_fd=self._target.fd)
        self._source.down(name)
        self._target.down(new)
        self.levels.append(os.listdir(self._source.fd))

    def _copy_file(self, name: str, new: str) -> None:
        source = os.open(name, _READ, dir_fd=self._source.fd)
        try:
            mode = stat.S_IMODE(os.fstat(source).st_mode)
            target = os.open(new, _WRITE, 0o600, dir_fd=self._target.fd)
            try:
                copy_data(source, target)
                os.fchmod(target, mode & 0o777)
            finally:
                os.close(target)
        finally:
            os.close(source)


def copy_data(source: int, target: int) -> None:
    """Copy a file's content, leaving out its holes."""
    size = os.fstat(source).st_size
    start = 0
    while start < size:
        start, end = _next_data(source, start, size)
        os.lseek(target, start, os.SEEK_SET)
        sent = pipes.send(source, target, start, end - start)
        if sent == 0:
            break
        start += sent
    os.ftruncate(target, size)


def _next_data(fd: int, start: int, size: int) -> tuple[int, int]:
    """Where the next data from `start` on begins and ends."""
    try:
        begin = os.lseek(fd, start, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return size, size
        if exc.errno != errno.EINVAL:
            raise
        return start, size
