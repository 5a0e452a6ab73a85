"""Previews: addresses of this machine that lead a browser to a port of a chat's sandbox.

A request must carry the random host name, which other users and web pages do not know. Connections
are taken, and heads read, by the process of the ways out: at a listener for each, or one for all.
"""

import errno
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex

import anyio

from mcp_sandbox import errors
from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.config.sections import PreviewsConfig
from mcp_sandbox.egress.link import HUNG_UP, Files
from mcp_sandbox.egress.process.visitors import refuse
from mcp_sandbox.egress.ways_out import Way, WaysOut
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.gate import Action, Gate
from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext

logger = logging.getLogger(__name__)

_MOST, _MOST_CONNECTIONS, _FULL = 8, 64, "503 Service Unavailable"
# A server inside may be restarting.
_CONNECT_S = 2.0

End = Callable[[], Awaitable[object]]


class Previews:
    """The previews of one chat. They end with its sandbox and with this server."""

    def __init__(self, chat: ChatId, gate: Gate, context: SessionContext) -> None:
        self._chat = chat
        self._gate = gate
        self._context = context
        self.has_listener = bool(context.previews_at)

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
        names, place = self._context.addresses, self._context.previews_at
        name, number = names.get((self._chat, port), ("", 0))
        try:
            listening, taken = (None, ExitStack()) if place else _listen("127.0.0.1", number)
        except OSError:
            # The program that has that port now may have seen the name.
            name, (listening, taken) = "", _listen("127.0.0.1", 0)
        name, number = name or token_hex(16), listening.getsockname()[1] if listening else 0
        names[self._chat, port] = name, number
        preview = _Preview(self._chat, port, name, self._gate, self._context.ways_out)
        self._context.tasks.start_soon(preview.serve, listening, taken, held.runtime.wait_broken)
        taken.callback(held.previews.pop, port)
        held.previews[port] = (place or f"http://localhost:{number}").replace("://", f"://{name}.")
        return held.previews[port]


@dataclass(eq=False)
class _Preview:
    chat: ChatId
    port: int
    name: str
    gate: Gate
    ways_out: WaysOut
    connections: int = 0

    async def serve(self, listening: socket.socket | None, taken: ExitStack, gone: End) -> None:
        """Take connections until the sandbox ends or the gate closes."""
        try:
            async with anyio.create_task_group() as tasks:

                async def end_with(end: End) -> None:
                    await end()
                    tasks.cancel_scope.cancel()

                def came(_: object, began: bytes, files: Files) -> None:
                    tasks.start_soon(self._answer, files[0], began)

                tasks.start_soon(end_with, gone)
                tasks.start_soon(end_with, self.gate.closing.wait)
                way = Way("preview", {"name": self.name}, came, listening=listening)
                async with self.ways_out.open(way):
                    await anyio.sleep_forever()
        except* OSError as group:
            logger.warning("the preview at %s cannot be served: %s", self.name, group.exceptions[0])
        finally:
            taken.close()

    async def _answer(self, came: socket.socket, began: bytes) -> None:
        """Serve a visitor whose first bytes carried the name."""
        self.connections += 1
        with suppress(*HUNG_UP, errors.SandboxGone), self.ways_out.visitors.take(self.chat) as room:
            async with SocketStream(came) as client:
                try:
                    if room and self.connections <= _MOST_CONNECTIONS:
                        await self._let_in(client, began)
                    else:
                        with self.ways_out.refused.take(self.chat) as may_wait:
                            await (refuse(client, _FULL) if may_wait else client.aclose())
                except (errors.CallerError, errors.OperatorError) as exc:
                    await refuse(client, "502 Bad Gateway", f"{exc}\n")
        self.connections -= 1

    async def _let_in(self, client: SocketStream, began: bytes) -> None:

        async def sent() -> AsyncGenerator[bytes]:
            yield began
            async for data in client:
                yield data

        async def take(stream: str, data: bytes) -> None:
            await (client.send_eof() if stream == "end" else client.send(data))

        async with self.gate.enter(Action(self.chat, "preview", {"port": self.port})) as entered:
            dial = entered.runtime.processes.dial
            await dial(self.port, sent(), take, wait_s=_CONNECT_S)


@asynccontextmanager
async def open_listener(ways_out: WaysOut, settings: PreviewsConfig) -> AsyncGenerator[str]:
    """Listen for all previews; yield the URL before whose host they have their names.

    Raises ConfigError: that place cannot be had.
    """
    host, _, port = settings.listen.rpartition(":")
    try:
        listening, taken = _listen(host, int(port))
    except (OSError, OverflowError) as exc:
        raise errors.ConfigError(f"previews.listen {settings.listen}: {exc}: name another") from exc
    with taken:
        async with ways_out.open(Way("previews", {}, listening=listening)):
            yield settings.url or f"http://localhost:{listening.getsockname()[1]}"


def _listen(host: str, port: int) -> tuple[socket.socket, ExitStack]:
    """Return a listener, and what closes it and the same port of ::1 beside it.

    Browsers try ::1 first, and would send the name to any program that listened there.
    """
    with ExitStack() as taken:
        listening = taken.enter_context(socket.create_server((host, port)))
        try:
            kept = taken.enter_context(socket.socket(socket.AF_INET6))
            kept.bind(("::1", listening.getsockname()[1]))
        except OSError as exc:
            if exc.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        return listening, taken.pop_all()
