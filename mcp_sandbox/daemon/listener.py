"""A listening unix socket at a path: nobody else's folder, nobody else's socket. Blocks."""

import os
import socket
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.errors import AlreadyServed, StorageUnavailable

_BACKLOG = 1024
# A socket's address has 108 bytes; the name while it is being made is longer by four.
_LONGEST_PATH = 103


class Listener:
    """Listens from the beginning until `close`. Make it only while the claim is held.

    Raises:
        StorageUnavailable: the folder is not safe or cannot be written.
        AlreadyServed: somebody answers on the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket, self._inode = _bound(path)

    def is_in_place(self) -> bool:
        """Whether clients that look for the path find us."""
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def renew(self) -> socket.socket:
        """Listen at the path again, and return the socket from before, which is to be closed."""
        before = self.socket
        self.socket, self._inode = _bound(self.path)
        return before

    def close(self) -> None:
        """Listen no more, and leave no socket behind that leads nowhere."""
        if self.socket.fileno() >= 0 and self.is_in_place():
            self.path.unlink(missing_ok=True)
        self.socket.close()


@asynccontextmanager
async def listening(path: Path) -> AsyncGenerator[Listener]:
    """Listen at the path until the block is left, or the listener is closed."""
    listener = await to_thread.run_sync(Listener, path)
    try:
        yield listener
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(listener.close)


def _bound(path: Path) -> tuple[socket.socket, int]:
    """A listening socket and its inode; it appears at the path at once and complete."""
    _check_folder(path)
    _check_place(path)
    new = path.with_name(f"{path.name}.new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        new.unlink(missing_ok=True)
        listener.bind(str(new))
        new.chmod(0o600)
        listener.listen(_BACKLOG)
        inode = new.lstat().st_ino
        new.rename(path)
    except OSError as exc:
        listener.close()
        raise StorageUnavailable(
            f"the socket {path} cannot be made: {exc.strerror}; name another with --socket"
        ) from exc
    return listener, inode


def _check_folder(path: Path) -> None:
    """Others must not be able to put their own socket in the place of ours."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise StorageUnavailable(
            f"the socket's path {path} has more than {_LONGEST_PATH} bytes: name a shorter one "
            "with --socket"
        )
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as exc:
        raise StorageUnavailable(
            f"the socket's folder {folder} cannot be used: {exc.strerror}; name another with "
            "--socket"
        ) from exc
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageUnavailable(
            f"others may write in the socket's folder {folder}, and could take the socket's place: "
            "own it and `chmod 700` it, or name another with --socket"
        )


def _check_place(path: Path) -> None:
    """What is there may be replaced only if it is a socket that nobody listens on."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StorageUnavailable(
            f"{path} is there and is no socket: remove it, or name another place with --socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as knock:
        try:
            knock.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            return
    raise AlreadyServed(
        f"another program listens on {path}: end it, or name another place with --socket"
    )
