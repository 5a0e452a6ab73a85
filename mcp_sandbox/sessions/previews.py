"""Previews: addresses of this machine that lead a browser to a port of a chat's sandbox.

A request must carry the random host name, which other users and web pages do not know. Only the
first head of each connection is read, and nothing is changed.
"""

import errno
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from secrets import compare_digest, token_hex

import anyio
from anyio.abc import SocketListener, SocketStream

from mcp_sandbox import errors
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.gate import Action, Gate
from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext

_MOST, _MOST_CONNECTIONS = 8, 64
_MOST_HEAD, _HEAD_S = 16 * 1024, 10.0
# A server inside may be restarting.
_CONNECT_S = 2.0
# A client still sending when we close would lose our answer; a listener's pause after an error.
_LAST_S, _TRY_AGAIN_S = 1.0, 0.1
_REQUEST = re.compile(rb"\S+ [/*]\S* HTTP/1\.[01]\r\n")
_HOST = re.compile(rb"^host[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_HUNG_UP = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)

End = Callable[[], Awaitable[object]]


class _RefusedError(Exception):
    """Its message is the HTTP status that the client gets."""


class Previews:
    """The previews of one chat. They end with its sandbox and with this server."""

    def __init__(self, chat: ChatId, gate: Gate, context: SessionContext) -> None:
        self._chat = chat
        self._gate = gate
        self._context = context

    async def open(self, port: int, *, wait_s: float = 20.0) -> str:
        """Return the address of what listens on `port`; it is the same while this server lives.

        Raises:
            NotFound: nothing listens there within `wait_s`.
            NotPermitted: previews are switched off.
            Busy: the chat has too many.
        """
        if not self._context.settings.previews:
            raise errors.NotPermitted("previews are switched off here (previews.enabled)")
        async with self._gate.enter(Action(self._chat, "preview", {"port": port})) as entered:
            await entered.runtime.processes.dial(port, wait_s=wait_s)
            opened = entered.held.previews
            if len(opened) >= _MOST and port not in opened:
                ports = ", ".join(map(str, opened))
                raise errors.Busy(f"{_MOST} ports have a preview, which is the most: {ports}")
            return opened.get(port) or self._start(port, entered.held)

    def _start(self, port: int, held: OpenSandbox) -> str:
        names = self._context.addresses
        name, wanted = names.get((self._chat, port), ("", 0))
        try:
            listening, taken = _listen(wanted)
        except OSError:
            # The program that has that port now may have seen the name.
            name, (listening, taken) = "", _listen(0)
        name = name or f"{token_hex(16)}.localhost"
        number = listening.getsockname()[1]
        names[self._chat, port] = name, number
        preview = _Preview(self._chat, port, name, self._gate)
        self._context.tasks.start_soon(preview.serve, listening, taken, held.runtime.wait_broken)
        held.previews[port] = f"http://{name}:{number}"
        return held.previews[port]


@dataclass(eq=False)
class _Preview:
    chat: ChatId
    port: int
    name: str
    gate: Gate
    connections: int = 0

    async def serve(self, listening: socket.socket, taken: ExitStack, gone: End) -> None:
        """Take connections until the sandbox ends or the gate closes."""
        listening.setblocking(False)
        with taken:
            listener = await SocketListener.from_socket(listening)
            async with listener, anyio.create_task_group() as tasks:

                async def end_with(end: End) -> None:
                    await end()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end_with, gone)
                tasks.start_soon(end_with, self.gate.closing.wait)
                while True:
                    try:
                        tasks.start_soon(self._answer, await listener.accept())
                    except OSError:
                        # No descriptor is left, or the client has gone again.
                        await anyio.sleep(_TRY_AGAIN_S)

    async def _answer(self, client: SocketStream) -> None:
        self.connections += 1
        with suppress(*_HUNG_UP, errors.SandboxGone):
            async with client:
                try:
                    await self._let_in(client)
                except _RefusedError as refused:
                    await _refuse(client, str(refused))
                except (errors.CallerError, errors.OperatorError) as exc:
                    await _refuse(client, "502 Bad Gateway", f"{exc}\n")
        self.connections -= 1

    async def _let_in(self, client: SocketStream) -> None:
        if self.connections > _MOST_CONNECTIONS:
            raise _RefusedError("503 Service Unavailable")
        with anyio.fail_after(_HEAD_S):
            began = await _beginning(client, self.name)

        async def sent() -> AsyncGenerator[bytes]:
            yield began
            async for data in client:
                yield data

        async def take(stream: str, data: bytes) -> None:
            await (client.send_eof() if stream == "end" else client.send(data))

        async with self.gate.enter(Action(self.chat, "preview", {"port": self.port})) as entered:
            dial = entered.runtime.processes.dial
            await dial(self.port, sent(), take, wait_s=_CONNECT_S)


def _listen(port: int) -> tuple[socket.socket, ExitStack]:
    """Return a listener on 127.0.0.1, and what closes it and the same port of ::1 beside it.

    Browsers try ::1 first, and would send the name to any program that listened there.
    """
    with ExitStack() as taken:
        listening = taken.enter_context(socket.create_server(("127.0.0.1", port)))
        try:
            kept = taken.enter_context(socket.socket(socket.AF_INET6))
            kept.bind(("::1", listening.getsockname()[1]))
        except OSError as exc:
            if exc.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        return listening, taken.pop_all()


async def _beginning(client: SocketStream, name: str) -> bytes:
    """Return the bytes up to the end of the first head, or more, if it carries the name."""
    came = b""
    while (end := came.find(b"\r\n\r\n", 0, _MOST_HEAD)) < 0:
        if len(came) >= _MOST_HEAD:
            raise _RefusedError("431 Request Header Fields Too Large")
        came += await client.receive()
    head = came[: end + 2]
    hosts = [host.partition(b":")[0].rstrip().lower() for host in _HOST.findall(head)]
    if len(hosts) != 1 or not compare_digest(hosts[0], name.encode()) or not _REQUEST.match(head):
        raise _RefusedError("421 Misdirected Request")
    return came


async def _refuse(client: SocketStream, status: str, text: str = "") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close"
    await client.send(f"{head}\r\n\r\n{text or status}".encode())
    await client.send_eof()
    with anyio.move_on_after(_LAST_S):
        async for _ in client:
            pass
