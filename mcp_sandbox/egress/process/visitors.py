"""Takes the connections of previews, and lets in those whose first head carries a name.

Web pages and other users, who do not know the name, can make as many connections as they like.
"""

import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import ClassVar

import anyio
import h11

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.egress.link import HUNG_UP, carry
from mcp_sandbox.egress.process.http_requests import STATUS, Peer, exchange
from mcp_sandbox.egress.targets import RefusedError

UNKNOWN = "404 Not Found", "There is no preview of this name, or not any more: ask for another.\n"
_MOST_WAITING = 64
_TOO_LARGE, _MOST_HEAD, _HEAD_S = "431 Request Header Fields Too Large", 16 * 1024, 10.0
# A client still sending when we close would lose our answer; a listener's pause after an error.
_LAST_S, _TRY_AGAIN_S = 1.0, 0.1
_REQUEST = re.compile(rb"\S+ [/*]\S* HTTP/1\.[01]\r\n")
_HOST = re.compile(rb"^host[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)

LetIn = Callable[[SocketStream, bytes], Awaitable[None]]


class Visitors:
    """Those who have connected to a listener and have not been let in yet.

    `names` has who lets them in, by a whole host or by its first label; others are `unwanted`.
    """

    # Those of all listeners: who comes to one takes no descriptors from all that is served.
    _waiting: ClassVar[dict[anyio.CancelScope, None]] = {}

    def __init__(self, names: Mapping[bytes, LetIn], *unwanted: str) -> None:
        self._names, self._unwanted = names, unwanted or ["421 Misdirected Request"]

    async def serve(self, listening: socket.socket, start: Callable[..., object]) -> None:
        """Take connections; who has waited longest without a head leaves when it gets full."""
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
            start(self._receive, came, scope)

    async def _receive(self, came: socket.socket, scope: anyio.CancelScope) -> None:
        try:
            with scope, suppress(*HUNG_UP, TimeoutError):
                async with SocketStream(came) as client:
                    began = await _read_beginning(client)
                    head, end, _ = began[:_MOST_HEAD].partition(b"\r\n\r\n")
                    if let_in := end and self._find(head + b"\r\n"):
                        del self._waiting[scope]
                        await let_in(client, began)
                    else:
                        await refuse(client, *(self._unwanted if end else [_TOO_LARGE]))
        finally:
            self._waiting.pop(scope, None)

    def _find(self, head: bytes) -> LetIn | None:
        hosts = [host.partition(b":")[0].rstrip().lower() for host in _HOST.findall(head)]
        if len(hosts) != 1 or not _REQUEST.match(head):
            return None
        # Hashes with a random key are compared first: the time tells nothing of a name.
        return self._names.get(hosts[0]) or self._names.get(hosts[0].partition(b".")[0])


async def _read_beginning(client: SocketStream) -> bytes:
    """Return the bytes up to the end of the first head, or more; or as many as one may have."""
    came = b""
    with anyio.fail_after(_HEAD_S):
        while len(came) < _MOST_HEAD and b"\r\n\r\n" not in came:
            came += await client.receive()
    return came


async def pass_on(let_in: Callable[..., object], client: SocketStream, began: bytes) -> None:
    """Have one request answered, and end the connection: the next may be for another preview.

    Both sides are read as HTTP: what is sent beyond a request, or beyond its answer, goes nowhere.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    let_in(theirs)
    visitor, inner = Peer(client, h11.SERVER), Peer(SocketStream(ours), h11.CLIENT)
    # So the visitor is told that it ends; the server gets what the visitor sent.
    visitor.http.receive_data(began.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    async with inner.stream:
        try:
            if asked := await visitor.head(first=True):
                fields = asked.headers.raw_items()[1:]
                sent = h11.Request(method=asked.method, target=asked.target, headers=fields)
                await exchange(visitor, inner, [sent], None, partial(ours.shutdown, socket.SHUT_WR))
            if visitor.http.our_state is h11.SWITCHED_PROTOCOL:
                await inner.stream.send(visitor.http.trailing_data[0])
                await client.send(inner.http.trailing_data[0])
                await carry(client, inner.stream)
        except RefusedError as exc:
            await visitor.answer(STATUS[exc.verdict], "text/plain", f"No answer: {exc}.\n".encode())
    with anyio.move_on_after(_LAST_S):
        await client.send_eof()
        await visitor.watch(lambda: None)


async def refuse(client: SocketStream, status: str, text: str = "") -> None:
    """Answer so, and close after the client has read it."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close"
    with anyio.move_on_after(_LAST_S):
        await client.send(f"{head}\r\n\r\n{text or status}".encode())
        await client.send_eof()
        async for _ in client:
            pass
