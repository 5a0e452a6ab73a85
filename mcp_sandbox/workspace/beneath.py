"""Safe host access to trees that other processes change at the same time.

Paths are resolved beneath an open directory by openat2, or component by component where the
kernel or a seccomp filter has no openat2. There is no way back to plain strings. Both ways refuse
the same things with the same errno: EXDEV for what leads outside or to another mount, ELOOP for a
link. Functions raise OSError; callers translate.

Names are bytes: any byte but NUL and the slash may be in them.
"""

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mcp_sandbox.durable import closing_fd

Resolver = Callable[[int, bytes, int, int], int]
"""(directory, path, flags, mode) -> a new file descriptor."""

PATH_MAX = 4096
_OPENAT2 = 437
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
# The kernel answers EAGAIN when a rename anywhere on the machine races with a "..".
_RETRIES = 128
AT_CWD = -100
"""In place of a directory, for a path as it stands; from linux/fcntl.h."""
_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def open_directory(root: int, path: bytes, *, resolver: Resolver | None = None) -> int:
    """Open a directory beneath `root` for listing."""
    return _open(root, path, os.O_RDONLY | os.O_DIRECTORY, 0, resolver)


def open_file(root: int, path: bytes, *, resolver: Resolver | None = None) -> int:
    """Open a regular file beneath `root` for reading; anything else raises EINVAL."""
    file = _open(root, path, os.O_RDONLY, 0, resolver)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise _error(errno.EINVAL, path)


def create_file(
    root: int,
    path: bytes,
    data: bytes,
    *,
    owner: tuple[int, int],
    mode: int = 0o600,
    resolver: Resolver | None = None,
) -> None:
    """Write a new file beneath `root`; raises FileExistsError when the name is taken."""
    file = _open(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, resolver)
    with os.fdopen(file, "wb") as stream:
        give(file, owner)
        stream.write(data)


def make_directory(
    parent: int, name: bytes, *, owner: tuple[int, int] | None = None, mode: int = 0o700
) -> tuple[int, bool]:
    """Open the directory `name` in `parent`, made when absent; the flag says whether it was made.

    `owner` is set when it was made. A link or file of that name raises OSError.
    """
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        return open_directory(parent, name), False
    directory = open_directory(parent, name)
    if owner is not None:
        give(directory, owner)
    return directory, True


def make_link(parent: int, name: bytes, text: bytes, *, owner: tuple[int, int]) -> None:
    """Make a symbolic link; whatever already has that name stays as it is."""
    with suppress(FileExistsError):
        os.symlink(text, name, dir_fd=parent)
        if owner[0] != os.geteuid():
            os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)


def rename_new(source_parent: int, source: bytes, target_parent: int, target: bytes) -> None:
    """Rename to a free name; raise FileExistsError, and change nothing, if it is taken."""
    _rename(source_parent, source, target_parent, target, _RENAME_NOREPLACE)


def exchange(source_parent: int, source: bytes, target_parent: int, target: bytes) -> None:
    """Exchange two names in one step, so that both always exist."""
    _rename(source_parent, source, target_parent, target, _RENAME_EXCHANGE)


def _rename(
    source_parent: int, source: bytes, target_parent: int, target: bytes, flags: int
) -> None:
    rename = getattr(_libc, "renameat2", None)
    if rename is None:
        raise _error(errno.ENOSYS, target)
    if rename(source_parent, source, target_parent, target, flags) != 0:
        raise _error(ctypes.get_errno(), target)


def give(file: int, owner: tuple[int, int]) -> None:
    """Make `owner` (uid, gid) the owner of an open file."""
    status = os.fstat(file)
    if (status.st_uid, status.st_gid) != owner:
        os.fchown(file, *owner)


def grant_owner(parent: int, name: bytes) -> int:
    """Give the owner of a closed directory (mode 000, say) all rights on it; returns its old mode.

    Raises PermissionError if this process does not own it.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY
    with closing_fd(os.open(name, flags, dir_fd=parent)) as directory:
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        # fchmod refuses O_PATH descriptors; this names the same inode whatever happens to the name.
        Path(f"/proc/self/fd/{directory}").chmod(mode | stat.S_IRWXU)
    return mode


def _open(root: int, path: bytes, flags: int, mode: int, resolver: Resolver | None) -> int:
    if b"\0" in path:
        raise _error(errno.EINVAL, path)
    if not path:
        raise _error(errno.ENOENT, path)
    if len(path) >= PATH_MAX:
        raise _error(errno.ENAMETOOLONG, path)
    if path.startswith(b"/"):
        raise _error(errno.EXDEV, path)
    return (resolver or choose_resolver(by_kernel))(root, path, flags | _ALWAYS, mode)


@functools.cache
def choose_resolver(preferred: Resolver) -> Resolver:
    """Return `preferred`, or `by_walking` if its system call is missing or forbidden here."""
    with closing_fd(os.open("/", os.O_PATH | os.O_DIRECTORY)) as here:
        try:
            os.close(preferred(here, b".", os.O_RDONLY | os.O_DIRECTORY, 0))
        except OSError as exc:
            if exc.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            return by_walking
    return preferred


def by_kernel(root: int, path: bytes, flags: int, mode: int) -> int:
    """Resolve with openat2."""
    rules = _BENEATH | _NO_MAGICLINKS | _NO_XDEV | _NO_SYMLINKS
    how = _OpenHow(flags=flags, mode=mode, resolve=rules)
    for _ in range(_RETRIES):
        file = int(_libc.syscall(_OPENAT2, root, path, ctypes.byref(how), ctypes.sizeof(how)))
        if file >= 0:
            return file
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            raise _error(code, path)
    raise _error(errno.EAGAIN, path)


def by_walking(root: int, path: bytes, flags: int, mode: int) -> int:
    """Resolve component by component, holding every directory on the way.

    ".." goes back along them and so never above the root.
    """
    mount, passed = _mount_id(root), [os.dup(root)]
    *above, last = _components(path)
    try:
        for name in above:
            if name == b"..":
                os.close(passed.pop())
            else:
                passed.append(_open_here(passed[-1], name, os.O_PATH | os.O_DIRECTORY, 0, mount))
            if not passed:
                raise _error(errno.EXDEV, path)
        return _open_here(passed[-1], last, flags, mode, mount)
    finally:
        for directory in passed:
            os.close(directory)


def _open_here(parent: int, name: bytes, flags: int, mode: int, mount: int) -> int:
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
    except NotADirectoryError:
        # With O_DIRECTORY the kernel says so of a link, too.
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise _error(errno.ELOOP, name) from None
        raise
    if _mount_id(file) == mount:
        return file
    os.close(file)
    raise _error(errno.EXDEV, name)


def _components(path: bytes) -> list[bytes]:
    """Return the parts of a path; one that requires a directory ends with "."."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    wants_directory = path.endswith((b"/", b"/.")) or not parts or parts[-1] == b".."
    return [*parts, b"."] if wants_directory else parts


def _mount_id(file: int) -> int:
    """Return the id of an open file's mount; st_dev does not tell bind mounts apart."""
    with Path(f"/proc/self/fdinfo/{file}").open("rb") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:"))


def _error(code: int, path: bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))
