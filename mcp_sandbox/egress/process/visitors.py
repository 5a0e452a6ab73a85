"""Takes the connections of a preview, and lets in those whose first head carries its name.

Web pages and other users, who do not know the name, can make as many connections as they like.
"""

import re
import socket
from collections.abc import Callable
from contextlib import suppress
from secrets import compare_digest
from typing import ClassVar

import anyio

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.egress.link import HUNG_UP

_MOST_WAITING = 64
_MOST_HEAD, _HEAD_S = 16 * 1024, 10.0
# A client still sending when we close would lose our answer; a listener's pause after an error.
_LAST_S, _TRY_AGAIN_S = 1.0, 0.1
_REQUEST = re.compile(rb"\S+ [/*]\S* HTTP/1\.[01]\r\n")
_HOST = re.compile(rb"^host[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


class RefusedError(Exception):
    """Its message is the HTTP status that the client gets."""


class Visitors:
    """Those who have connected to a preview called `name` and have not been let in yet."""

    # Those of all previews: who comes to one takes no descriptors from all that is served.
    _waiting: ClassVar[dict[anyio.CancelScope, None]] = {}

    def __init__(self, name: str, let_in: Callable[[socket.socket, bytes], object]) -> None:
        self._name, self._let_in = name, let_in

    async def serve(self, listening: socket.socket) -> None:
        """Take connections; who has waited longest without a head leaves when it gets full."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    await anyio.wait_readable(listening)
                    came, _ = listening.accept()
                except BlockingIOError:
                    continue
                except OSError:
                    # No descriptor is left, or the client has gone again.
                    await anyio.sleep(_TRY_AGAIN_S)
                    continue
                came.setblocking(False)
                # Else a second small piece waits until the client confirms the first.
                came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                scope = anyio.CancelScope()
                self._waiting[scope] = None
                if len(self._waiting) > _MOST_WAITING:
                    next(iter(self._waiting)).cancel()
                tasks.start_soon(self._receive, came, scope)

    async def _receive(self, came: socket.socket, scope: anyio.CancelScope) -> None:
        client = SocketStream(came)
        try:
            with scope, suppress(*HUNG_UP, TimeoutError):
                async with client:
                    await self._look_at(client, came)
        finally:
            self._waiting.pop(scope, None)

    async def _look_at(self, client: SocketStream, came: socket.socket) -> None:
        try:
            with anyio.fail_after(_HEAD_S):
                began = await _read_beginning(client, self._name)
            self._let_in(came.dup(), began)
        except RefusedError as refused:
            await refuse(client, str(refused))


async def _read_beginning(client: SocketStream, name: str) -> bytes:
    """Return the bytes up to the end of the first head, or more, if it carries the name."""
    came = b""
    while (end := came.find(b"\r\n\r\n", 0, _MOST_HEAD)) < 0:
        if len(came) >= _MOST_HEAD:
            raise RefusedError("431 Request Header Fields Too Large")
        came += await client.receive()
    head = came[: end + 2]
    hosts = [host.partition(b":")[0].rstrip().lower() for host in _HOST.findall(head)]
    if len(hosts) != 1 or not compare_digest(hosts[0], name.encode()) or not _REQUEST.match(head):
        raise RefusedError("421 Misdirected Request")
    return came


async def refuse(client: SocketStream, status: str, text: str = "") -> None:
    """Answer so, and close after the client has read it."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close"
    with anyio.move_on_after(_LAST_S):
        await client.send(f"{head}\r\n\r\n{text or status}".encode())
        await client.send_eof()
        async for _ in client:
            pass
