"""Whole files, whole folders, locks, and who may write; standard library only, blocking.

After a power cut there is the old or the new, never a part. A lock ends with its process. What
cannot be read, or lies where a file belongs, is set aside as `NAME.damaged-TIMESTAMP`.
"""

import errno
import fcntl
import grp
import json
import logging
import os
import pwd
import secrets
import shlex
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DAMAGED = ".damaged-"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def read_note(path: str | Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file.

    Raises:
        ValueError: there is something else.
        OSError: it cannot be read.
    """
    found = read_dated_note(path)
    return found[0] if found else None


def read_dated_note(path: str | Path) -> tuple[dict[str, Any], float] | None:
    """Return the same, and when the file was changed last, in seconds since the epoch."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError("it is no file") from exc
        raise
    try:
        with closing_fd(descriptor):
            status = os.fstat(descriptor)
            data = os.read(descriptor, min(status.st_size, 1 << 20))
        return dict(json.loads(str(data, "utf-8"))), status.st_mtime
    except (IsADirectoryError, RecursionError, TypeError) as exc:
        raise ValueError(f"it holds no JSON object: {exc}") from exc


def write_note(path: Path, content: Mapping[str, Any], *, synced: bool = True) -> None:
    """Write what `read_note` reads, also where a folder lies in its place. Raises OSError."""
    data = json.dumps(content).encode()
    try:
        write_file(path, data, synced=synced)
    except IsADirectoryError as exc:
        set_aside(path, exc.strerror)
        write_file(path, data, synced=synced)


def set_aside(path: str | Path, why: object, *, dir_fd: int | None = None) -> None:
    """Rename what is damaged, and say so in the log; gone already is fine. Raises OSError."""
    folder, name = os.path.split(path)
    mark = f"{name}{DAMAGED}"
    aside = f"{mark}{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}"
    with suppress(FileNotFoundError):
        os.rename(path, os.path.join(folder, aside), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)  # noqa: PTH118
        logger.warning("%s is damaged (%s): set aside as %s, and made anew", path, why, aside)
    if dir_fd is None:
        ruins = sorted(ruin for ruin in Path(folder).iterdir() if ruin.name.startswith(mark))
        # A disk that damages files must not fill up with them.
        for ruin in ruins[:-3]:
            with suppress(OSError):
                ruin.unlink()


def write_file(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o600,
    like: os.stat_result | None = None,
    synced: bool = True,
) -> None:
    """Replace a file, or make it, with a mode or with owner and mode of another.

    Not `synced` where no power cut is outlived. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, mode)
        with os.fdopen(descriptor, "wb") as stream:
            if like is not None:
                os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, like.st_mode & 0o7777)
            stream.write(data)
            stream.flush()
            if synced:
                os.fsync(descriptor)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if synced:
        sync(path.parent)


def follow(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all on the way to a path, each link too, and what lies there last. Raises OSError."""
    here, at, ahead = Path("/"), None, [*reversed(path.absolute().parts)]
    with ExitStack() as opened:
        for _ in range(256):
            below = os.open(name := ahead.pop(), os.O_PATH | _OPEN, dir_fd=at)
            opened.callback(os.close, below)
            if stat.S_ISLNK((found := os.fstat(below)).st_mode):
                ahead += reversed(Path(os.readlink("", dir_fd=below)).parts or ".")
                yield here / name, found
                continue
            at, here = below, here.parent if name == ".." else here / name
            yield here, found
            if not ahead:
                return
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def check_trusted(path: Path, *, private: bool = False) -> None:
    """Raise PermissionError if others than this user and root can change what lies at a path.

    Nor may they be able to read what is `private`. Its text says what to run. Raises OSError.
    """
    *above, last = follow(path)
    owners = {0, os.geteuid()}
    # In a user namespace, as of a sandbox, those of the machine itself are nobody.
    if Path("/proc/self/uid_map").read_text().split()[-1] != "4294967295":
        owners.add(65534)
    for step, found in (last, *reversed(above)):
        mode, name = found.st_mode, shlex.quote(str(step))
        # In a sticky folder, such as /tmp, nobody can replace what is another's.
        safe = stat.S_ISLNK(mode) or (mode & stat.S_ISVTX and step != last[0])
        grouped = mode & stat.S_IWGRP and not _is_own_group(step, found.st_gid)
        if found.st_uid not in owners:
            why = f"{step} belongs to uid {found.st_uid}: run `chown {os.geteuid()} {name}`"
        elif private and step == last[0] and mode & 0o077:
            why = f"others can read or change {step}: run `chmod 600 {name}`"
        elif (mode & stat.S_IWOTH or grouped) and not safe:
            why = f"others may write to {step}: run `chmod go-w {name}`"
        else:
            continue
        raise PermissionError(errno.EPERM, why)


def _is_own_group(path: Path, gid: int) -> bool:
    """Return whether nobody else is in a group of this user, as many systems make one for each."""
    with suppress(OSError):
        # Where a list names more users, the group's bits are those of all of them.
        if "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False):
            return False
    users = pwd.getpwall()
    inside = {each.pw_name for each in users if each.pw_gid == gid}
    with suppress(KeyError):
        inside |= {*grp.getgrgid(gid).gr_mem}
    mine = {each.pw_name for each in users if each.pw_uid == os.geteuid()}
    return gid == os.getegid() and inside <= mine


def make_folder(path: Path) -> None:
    """Make a folder and those missing above it, for this user only. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync(path.parent)


def publish_folder(made: Path, target: Path) -> bool:
    """Give a finished folder its name; False, and nothing is done, if the name is taken.

    Raises OSError.
    """
    for folder, _, names in os.walk(made, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):  # noqa: PTH114, PTH118 - as walked
                sync(Path(folder, name))
        sync(Path(folder))
    try:
        made.rename(target)
    except OSError as exc:
        if exc.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    sync(target.parent)
    return True


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, onto the disk. Raises OSError."""
    with closing_fd(os.open(path, os.O_RDONLY | _OPEN)) as descriptor:
        os.fsync(descriptor)


@contextmanager
def closing_fd(descriptor: int) -> Generator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(path: str | Path, *, wait: bool, dir_fd: int | None = None) -> int | None:
    """Return a descriptor that locks a file; None if another has the lock and `wait` is false.

    The file is made if need be, and stays. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | _OPEN
    try:
        descriptor = os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno not in (errno.EISDIR, errno.ELOOP):
            raise
        set_aside(path, exc.strerror, dir_fd=dir_fd)
        descriptor = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether another has the lock of a file, if there is one. Raises OSError."""
    if not path.exists() or (descriptor := lock(path, wait=False)) is None:
        return path.exists()
    unlock(descriptor)
    return False


def unlock(descriptor: int) -> None:
    """Release a lock. A close alone would not: a child being started has the file open, too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def locked(path: str | Path, *, dir_fd: int | None = None) -> Generator[int]:
    """Wait for the lock of a file and hold it; yields its descriptor. Raises OSError."""
    descriptor = lock(path, wait=True, dir_fd=dir_fd)
    assert descriptor is not None  # noqa: S101
    try:
        yield descriptor
    finally:
        unlock(descriptor)
