"""Unix sockets of a runner: made here, handed over to it at its start, and connected to.

A socket is reached through the descriptor of its directory and without following links: a path
may be longer than the 108 bytes of an address, and code without walls may plant links. That the
runner is the one listening is proved later, by the token.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from mcp_sandbox.durable import closing_fd
from mcp_sandbox.errors import SandboxGone

_NAME = "runner.sock"
_QUEUE = 64
# A sender that always has more must not keep all others waiting.
_AT_A_STRETCH = 16
_RETRY_S = 0.001
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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


def listen(directory: Path, name: str = _NAME) -> socket.socket:
    """Return a new listening socket in a directory. Blocks on the disk. Raises OSError."""
    with closing_fd(os.open(directory, _FOLDER)) as folder:
        path = f"/proc/self/fd/{folder}/{name}"
        listener = socket.create_server(path, family=socket.AF_UNIX, backlog=_QUEUE)
    listener.setblocking(False)
    return listener


async def await_runner(line: socket.socket, *, within_s: float) -> bool:
    """Wait until the runner at the other end says that it runs; False if it ended or is late."""
    # The connection is reset if the runner ends before it reads its token.
    with suppress(ConnectionResetError), anyio.move_on_after(within_s):
        line.setblocking(False)
        await anyio.wait_readable(line)
        return bool(line.recv(1))
    return False


async def accept_runner(starter: socket.socket, *, within_s: float) -> socket.socket:
    """Return the connection of a runner that starts; raise SandboxGone if it is late."""
    with anyio.move_on_after(within_s):
        await anyio.wait_readable(starter)
        return starter.accept()[0]
    raise SandboxGone(f"the runner did not start within {within_s:g} s: call again")


def hand_over(line: socket.socket, directory: Path, token: bytes) -> None:
    """Give a runner its secret, and a socket in `directory`; raise SandboxGone if it has ended."""
    given = json.dumps({"token": token.hex()}).encode()
    try:
        with listen(directory) as listener:
            socket.send_fds(line, [given], [listener.fileno()])
    except ConnectionError as exc:
        raise SandboxGone("the sandbox ended while it was started: call again") from exc


async def connect(directory: Path, *, deadline_s: float) -> ByteStream:
    """Open a connection to the runner's socket in `directory`.

    Raises SandboxGone if the runner has ended or accepts none within `deadline_s`, or something
    else is in the socket's place.
    """
    how = f"did not accept a connection within {deadline_s:g} s"
    with anyio.move_on_after(deadline_s):
        try:
            with closing_fd(os.open(directory, _FOLDER)) as folder:
                found = os.open(_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with closing_fd(found):
                return await dial(f"/proc/self/fd/{found}")
        except OSError as exc:
            how = f"has ended, or its socket was replaced ({exc.strerror})"
    raise SandboxGone(f"the runner {how}; the next call starts a new sandbox on the same files")
