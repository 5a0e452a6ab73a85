"""Moves and deletes files and trees of any depth, without following links."""

from __future__ import annotations

import errno
import os
import os.path
import stat
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.call import closing_fd, send
from mcp_sandbox.runner.files.paths import TEMPORARY, protect, relativize, resolve, show
from mcp_sandbox.runner.files.walk import Descent, kind_of, open_directory
from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.files.call import OperationCall

# How often a directory that other programs keep filling is emptied before giving up.
_ROUNDS = 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOREPLACE = 1
_AT_FDCWD = -100
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def move(call: OperationCall) -> dict[str, Any]:
    """Rename a file, link or directory. `destination` is the full new name."""
    source, destination = resolve(call.text("source")), resolve(call.text("destination"), new=True)
    overwrite = call.flag("overwrite")
    os.lstat(source)
    protect(source, "moved")
    protect(destination, "replaced")
    if source == destination:
        raise OpError("invalid", "source and destination are the same: give a new name")
    real = os.path.realpath(source)
    inside = os.path.realpath(os.path.dirname(destination)) + "/"
    if not os.path.islink(source) and os.path.isdir(source) and inside.startswith(real + "/"):
        raise OpError(
            "invalid", f"{show(destination)} is inside {show(source)}: choose a place outside it"
        )
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    call.wait_turn(source, destination)
    replaced = os.path.lexists(destination)
    if replaced and not overwrite:
        raise _taken(destination)
    _rename(source, destination, overwrite=overwrite)
    paths = {"source": relativize(source), "destination": relativize(destination)}
    return {**paths, "replaced": replaced}


def _taken(destination: str) -> OpError:
    if os.path.isdir(destination):
        return OpError(
            "exists",
            f"{show(destination)} is an existing directory: give the full new name, such as "
            f"{show(destination)}/name",
        )
    return OpError(
        "exists", f"{show(destination)} exists: choose another name or pass overwrite=true"
    )


def _rename(source: str, destination: str, *, overwrite: bool) -> None:
    try:
        _rename_here(source, destination, overwrite=overwrite)
    except FileExistsError as exc:
        raise _taken(destination) from exc
    except OSError as exc:
        if exc.errno == errno.ENOTEMPTY:
            raise OpError(
                "exists", f"{show(destination)} is a directory with content: delete it first"
            ) from exc
        if exc.errno != errno.EXDEV:
            raise
        _move_across(source, destination, overwrite=overwrite)


def _rename_here(source: str, destination: str, *, overwrite: bool) -> None:
    if not overwrite:
        _rename_new(source, destination)
        return
    os.rename(source, destination)
    # The kernel does nothing when both names are hard links of one file.
    if os.path.lexists(source) and os.path.samestat(os.lstat(source), os.lstat(destination)):
        os.unlink(source)


def _rename_new(source: str, destination: str) -> None:
    """Rename; raise FileExistsError if the destination exists by then."""
    names = _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination)
    try:
        done = processes.find_function("renameat2")(*names, _NOREPLACE)
        failed = 0 if done == 0 else processes.read_errno()
    except AttributeError:
        failed = errno.ENOSYS
    if failed in _NOT_OFFERED:
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, "it exists", destination)
        os.rename(source, destination)
    elif failed:
        raise OSError(failed, os.strerror(failed))


def _move_across(source: str, destination: str, *, overwrite: bool) -> None:
    """Copy beside the destination, rename the copy into place, then delete the source."""
    draft = os.path.join(os.path.dirname(destination), TEMPORARY + os.urandom(8).hex())
    try:
        copy_tree(source, draft)
        _rename_here(draft, destination, overwrite=overwrite)
    except BaseException:
        remove(draft)
        raise
    remove(source)


def remove(path: str) -> None:
    """Remove a file, link or tree, if it exists."""
    if not os.path.lexists(path):
        return
    if stat.S_ISDIR(os.lstat(path).st_mode):
        remove_tree(path)
    else:
        os.unlink(path)


def copy_tree(source: str, target: str) -> None:
    """Copy `source` to a new name; OpError for a socket or device. A failed copy stays there."""
    with closing(_above(source)) as there, closing(_above(target)) as here:
        copying = _Copying(there, here)
        copying.copy(os.path.basename(source), os.path.basename(target))
        while copying.levels:
            copying.step()


def _above(path: str) -> Descent:
    return Descent(open_directory(os.path.dirname(path)))


class _Copying:
    """Two descents side by side. `levels` hold the entries still to be copied at each depth."""

    def __init__(self, source: Descent, target: Descent) -> None:
        self.source = source
        self.target = target
        self.levels: list[list[str]] = []

    def step(self) -> None:
        """Copy the next entry, or leave the current directory."""
        if self.levels[-1]:
            name = self.levels[-1].pop()
            self.copy(name, name)
            return
        # Only now: new entries would change its time, and a read-only mode would forbid them.
        found = os.fstat(self.source.fd)
        os.fchmod(self.target.fd, stat.S_IMODE(found.st_mode))
        os.utime(self.target.fd, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.source.up()
        self.target.up()
        self.levels.pop()

    def copy(self, name: str, new: str) -> None:
        """Copy an entry; the content of a directory follows in further steps."""
        found = os.stat(name, dir_fd=self.source.fd, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(new, 0o700, dir_fd=self.target.fd)
            self.source.down(name)
            self.target.down(new)
            self.levels.append(os.listdir(self.source.fd))
        elif stat.S_ISREG(found.st_mode):
            self._copy_file(name, new)
        elif stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=self.source.fd), new, dir_fd=self.target.fd)
        elif stat.S_ISFIFO(found.st_mode):
            os.mkfifo(new, stat.S_IMODE(found.st_mode), dir_fd=self.target.fd)
        else:
            raise OpError(
                "unsupported",
                f"{show(name)} is a {kind_of(found.st_mode)}, which cannot be moved to another "
                "file system: delete it first",
            )
        if not stat.S_ISDIR(found.st_mode):
            times = (found.st_atime_ns, found.st_mtime_ns)
            os.utime(new, ns=times, dir_fd=self.target.fd, follow_symlinks=False)

    def _copy_file(self, name: str, new: str) -> None:
        with closing_fd(os.open(name, _READ, dir_fd=self.source.fd)) as source:
            mode = stat.S_IMODE(os.fstat(source).st_mode)
            with closing_fd(os.open(new, _WRITE, 0o600, dir_fd=self.target.fd)) as target:
                copy_data(source, target)
                os.fchmod(target, mode & 0o777)


def copy_data(source: int, target: int) -> None:
    """Copy a file's content, leaving out its holes."""
    size = os.fstat(source).st_size
    start = 0
    while start < size:
        start, end = _next_data(source, start, size)
        os.lseek(target, start, os.SEEK_SET)
        sent = send(source, target, start, end - start)
        if sent == 0:
            break
        start += sent
    os.ftruncate(target, size)


def _next_data(fd: int, start: int, size: int) -> tuple[int, int]:
    """Return where the next data from `start` on begins and ends."""
    try:
        begin = os.lseek(fd, start, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return size, size
        if exc.errno != errno.EINVAL:
            raise
        return start, size


def delete(call: OperationCall) -> dict[str, Any]:
    """Remove a file, a link itself, an empty directory, or with `recursive` a whole tree."""
    path = resolve(call.text("path"))
    protect(path, "deleted")
    found, entries = os.lstat(path), 1
    call.wait_turn(path)
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(path)
    elif call.flag("recursive"):
        entries = remove_tree(path)
    else:
        os.rmdir(path)
    return {"path": relativize(path), "kind": kind_of(found.st_mode), "entries": entries}


def remove_tree(path: str, *, force: bool = False) -> int:
    """Remove a directory with all its content; return the number of entries.

    With `force` also where modes of directories forbid it.
    """
    with closing(_above(path)) as descent:
        removal = _Removal(descent, force=force)
        try:
            removal.enter(os.path.basename(path))
            while removal.levels:
                removal.step()
        except OSError as exc:
            where = "/".join(level.name for level in removal.levels)
            exc.filename = os.path.join(os.path.dirname(path), where)
            raise
        return removal.removed


class _EmptiedFolder:
    """A directory that is being emptied: its name and the directories still in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directories: list[str] = []
        self.rounds = 0


class _Removal:
    def __init__(self, descent: Descent, *, force: bool) -> None:
        self.descent = descent
        self.force = force
        self.levels: list[_EmptiedFolder] = []
        self.removed = 0

    def enter(self, name: str) -> None:
        """Enter a directory and remove everything in it but directories."""
        try:
            if self.force:
                os.chmod(name, 0o700, dir_fd=self.descent.fd)
            self.descent.down(name)
        except OSError as exc:
            # Gone or replaced by now: removing the directory above will show what is left.
            if self.levels and exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return
            raise
        self.levels.append(_EmptiedFolder(name))
        self._sweep()

    def step(self) -> None:
        """Enter the next directory, or leave and remove the current one."""
        level = self.levels[-1]
        if level.directories:
            self.enter(level.directories.pop())
            return
        self.descent.up()
        try:
            self.removed += _gone(os.rmdir, level.name, self.descent.fd)
            self.levels.pop()
        except OSError as exc:
            level.rounds += 1
            if exc.errno != errno.ENOTEMPTY or level.rounds > _ROUNDS:
                raise
            self.descent.down(level.name)
            self._sweep()

    def _sweep(self) -> None:
        with os.scandir(self.descent.fd) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.levels[-1].directories.append(entry.name)
            else:
                self.removed += _gone(os.unlink, entry.name, self.descent.fd)


def _gone(remove: Callable[..., None], name: str, directory: int) -> int:
    """Remove a name; return 0 if it was gone or became a directory meanwhile."""
    try:
        remove(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    return 1
