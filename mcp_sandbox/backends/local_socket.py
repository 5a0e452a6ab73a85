"""Connects to a runner's unix socket in a directory that user code can write to.

It is opened beneath the directory without following links and reached by its descriptor: a planted
link leads nowhere, and its path may be longer than the 108 bytes of an address. That the runner is
the one listening is proved later, by the token.
"""

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from mcp_sandbox.durable import closing_fd
from mcp_sandbox.errors import SandboxGone

_NAME = "runner.sock"
# A sender that always has more must not keep all others waiting.
_AT_A_STRETCH = 16
_RETRY_S = 0.001
_NOT_YET = (FileNotFoundError, ConnectionRefusedError)


class SocketStream(ByteStream):
    """A connected unix socket as a byte stream, for one reader and one writer at a time.

    The event loop's own stream needs a turn of the loop for each piece, and fails if a socket is
    closed at the moment in which data arrives.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over a socket that does not block."""
        self._socket = connected
        self._stretch = 0

    def hand_over(self) -> socket.socket:
        """Return the socket, for another process; this stream is closed."""
        handed = self._socket.dup()
        self._socket.close()
        return handed

    async def receive(self, max_bytes: int = 65536) -> bytes:
        self._stretch += 1
        if self._stretch >= _AT_A_STRETCH:
            self._stretch = 0
            await checkpoint()
        while True:
            try:
                data = self._socket.recv(max_bytes)
            except BlockingIOError:
                self._stretch = 0
                await anyio.wait_readable(self._socket)
            except OSError as exc:
                raise self._lost() from exc
            else:
                if not data:
                    raise anyio.EndOfStream
                return data

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as exc:
                raise self._lost() from exc

    async def send_eof(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            # Tasks that wait for the socket learn that it is closed.
            anyio.notify_closing(self._socket)
            self._socket.close()

    def _lost(self) -> Exception:
        closed = self._socket.fileno() < 0
        return anyio.ClosedResourceError() if closed else anyio.BrokenResourceError()


async def dial(path: str) -> SocketStream:
    """Connect to a socket at a trusted path. Raises OSError if no process listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.setblocking(False)
        while True:
            try:
                client.connect(path)
            except BlockingIOError:
                # The queue is full, and the kernel does not tell when there is room.
                await anyio.sleep(_RETRY_S)
            else:
                return SocketStream(client)
    except BaseException:
        client.close()
        raise


async def connect(
    directory: Path, *, deadline_s: float, has_ended: Callable[[], bool] = lambda: False
) -> ByteStream:
    """Wait until the runner's socket in `directory` accepts a connection, and open one.

    `has_ended` returns whether the runner has ended. Raises SandboxGone if no connection is
    accepted within `deadline_s`, or something else is in the socket's place.
    """
    with anyio.move_on_after(deadline_s):
        while True:
            # The file appears at bind, but nothing on the host tells of listen.
            with suppress(*_NOT_YET), closing_fd(_open_socket(directory)) as target:
                return await dial(f"/proc/self/fd/{target}")
            if has_ended():
                break
            await anyio.sleep(_RETRY_S)
    how = "has ended" if has_ended() else f"did not listen on {_NAME} within {deadline_s:g} s"
    raise SandboxGone(f"the runner {how}; the next call starts a new sandbox on the same files")


def _open_socket(directory: Path) -> int:
    """Return a path descriptor of the socket; raise FileNotFoundError if it is not there yet."""
    try:
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as exc:
        now = "gone" if isinstance(exc, FileNotFoundError) else "not a directory any more"
        raise SandboxGone(
            f"the socket directory {directory} is {now}; the next call starts a new sandbox"
        ) from exc
    with closing_fd(folder):
        found = os.open(_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    if stat.S_ISSOCK(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise SandboxGone(
        f"{_NAME} in {directory} is not a socket: code in the sandbox replaced it; "
        "the next call starts a new sandbox on the same files"
    )
