"""A connected unix socket as a byte stream.

The event loop's own goes once round the loop for each piece that it sends or takes, and stumbles
over a socket that is closed in the moment in which something arrives.
"""

import socket

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

# Somebody who always has more to send must not keep everybody else waiting.
_AT_A_STRETCH = 16


class SocketStream(ByteStream):
    """One reader and one writer at a time."""

    def __init__(self, connected: socket.socket) -> None:
        """Take over a socket that does not block."""
        self._socket = connected
        self._stretch = 0

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
            # Whoever waits for it learns that it is closed.
            anyio.notify_closing(self._socket)
            self._socket.close()

    def _lost(self) -> Exception:
        closed = self._socket.fileno() < 0
        return anyio.ClosedResourceError() if closed else anyio.BrokenResourceError()
