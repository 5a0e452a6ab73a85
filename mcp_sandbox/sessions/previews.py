"""Previews: addresses of this machine that lead a browser to a port of a chat's sandbox.

Only who knows the name is let in, which other users and web pages do not. What passes is neither
read, but for the first head of each connection, nor changed.
"""

import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from secrets import compare_digest, token_hex

import anyio
from anyio.abc import SocketListener, SocketStream

from mcp_sandbox import errors
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.gate import Action, Gate
from mcp_sandbox.sessions.rooms import Held, Rooms

_MOST, _MOST_CONNECTIONS = 8, 64
_MOST_HEAD, _HEAD_S = 16 * 1024, 10.0
# A server inside may just be starting anew.
_CONNECT_S = 2.0
# How long the other side may go on sending after the server inside has ended, or we refused it.
_LAST_S, _REFUSED_S = 30.0, 1.0
_TRY_AGAIN_S = 0.1
_REQUEST = re.compile(rb"\S+ [/*]\S* HTTP/1\.[01]\r\n")
_HOST = re.compile(rb"^host[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_STATUS: Mapping[type[errors.SandboxError], HTTPStatus] = {
    errors.InvalidArgument: HTTPStatus.MISDIRECTED_REQUEST,
    errors.TooLarge: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    errors.Busy: HTTPStatus.SERVICE_UNAVAILABLE,
}
_HUNG_UP = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class Previews:
    """Those of one chat. They end with its sandbox and with this server."""

    def __init__(self, chat: ChatId, gate: Gate, rooms: Rooms) -> None:
        self._chat = chat
        self._gate = gate
        self._rooms = rooms

    async def open(self, port: int, *, wait_s: float = 20.0) -> str:
        """The address of what listens on `port`, the same for as long as this server lives.

        Raises:
            NotFound: nothing listens there within `wait_s`.
            NotPermitted: previews are switched off.
            Busy: the chat has too many.
        """
        if not self._rooms.settings.previews:
            raise errors.NotPermitted("previews are switched off here (previews.enabled)")
        async with self._gate.enter(Action(self._chat, "preview", {"port": port})) as entered:
            await entered.runtime.processes.dial(port, wait_s=wait_s)
            opened = entered.held.previews
            if port not in opened:
                if len(opened) >= _MOST:
                    ports = ", ".join(map(str, opened))
                    raise errors.Busy(f"{_MOST} ports have a preview, which is the most: {ports}")
                opened[port] = self._start(port, entered.held)
            return opened[port]

    def _start(self, port: int, held: Held) -> str:
        names = self._rooms.addresses
        name, wanted = names.get((self._chat, port), (f"{token_hex(16)}.localhost", 0))
        listening = _listen(wanted)
        number = listening.getsockname()[1]
        names[self._chat, port] = name, number
        preview = _Preview(self._chat, port, name, self._gate, held)
        self._rooms.tasks.start_soon(preview.serve, listening)
        return f"http://{name}:{number}"


def _listen(wanted: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", wanted))
    except OSError as exc:
        if not wanted:
            raise errors.CapacityReached(f"no address is left for a preview: {exc}") from exc
        return _listen(0)


@dataclass(eq=False)
class _Preview:
    chat: ChatId
    port: int
    name: str
    gate: Gate
    held: Held
    connections: int = 0

    async def serve(self, listening: socket.socket) -> None:
        """Take connections until the sandbox ends or the gate closes."""
        listening.setblocking(False)
        async with (
            await SocketListener.from_socket(listening) as listener,
            anyio.create_task_group() as tasks,
        ):
            for over in (self.held.runtime.wait_broken, self.gate.closing.wait):
                tasks.start_soon(_cancel_after, over, tasks.cancel_scope)
            while True:
                try:
                    tasks.start_soon(self._answer, await listener.accept())
                except OSError:
                    # No descriptor is left, or who came has gone again.
                    await anyio.sleep(_TRY_AGAIN_S)

    async def _answer(self, client: SocketStream) -> None:
        self.connections += 1
        with suppress(*_HUNG_UP, errors.SandboxGone):
            async with client:
                try:
                    await self._let_in(client)
                except (errors.CallerError, errors.OperatorError) as exc:
                    await _refuse(client, exc)
        self.connections -= 1

    async def _let_in(self, client: SocketStream) -> None:
        if self.connections > _MOST_CONNECTIONS:
            raise errors.Busy(f"this preview has {_MOST_CONNECTIONS} connections")
        with anyio.fail_after(_HEAD_S):
            began = await _beginning(client, self.name)
        async with self.gate.enter(Action(self.chat, "preview", {"port": self.port})) as entered:
            # Another sandbox would show another page.
            if entered.held is not self.held:
                return
            with anyio.CancelScope() as scope:

                async def take(data: bytes) -> None:
                    if data:
                        await client.send(data)
                    else:
                        await client.send_eof()
                        scope.deadline = anyio.current_time() + _LAST_S

                sent = _all_of(began, client)
                await entered.runtime.processes.dial(self.port, sent, take, wait_s=_CONNECT_S)


async def _cancel_after(over: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
    await over()
    scope.cancel()


async def _beginning(client: SocketStream, name: str) -> bytes:
    """What has come once the first head is whole: it carries the name."""
    came = b""
    while (end := came.find(b"\r\n\r\n", 0, _MOST_HEAD)) < 0:
        if len(came) >= _MOST_HEAD:
            raise errors.TooLarge(f"the head of a request is longer than {_MOST_HEAD:,} bytes")
        came += await client.receive()
    head = came[: end + 2]
    hosts = [host.partition(b":")[0].rstrip().lower() for host in _HOST.findall(head)]
    known = len(hosts) == 1 and compare_digest(hosts[0], name.encode())
    if not (known and _REQUEST.match(head)):
        raise errors.InvalidArgument("this preview is not known by that name")
    return came


async def _all_of(began: bytes, client: SocketStream) -> AsyncGenerator[bytes]:
    yield began
    async for data in client:
        yield data


async def _refuse(client: SocketStream, why: errors.SandboxError) -> None:
    status = _STATUS.get(type(why), HTTPStatus.BAD_GATEWAY)
    text = f"{why}\n".encode()
    head = (
        f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    await client.send(head.encode() + text)
    await client.send_eof()
    # Who is still sending when we hang up loses the answer.
    with anyio.move_on_after(_REFUSED_S):
        async for _ in client:
            pass
