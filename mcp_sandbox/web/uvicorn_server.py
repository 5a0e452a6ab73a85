"""Streamable HTTP: the SDK's application behind our guard, under uvicorn, as one block.

TLS, where it is wanted, is the work of a proxy in front.
"""

import errno
import ipaddress
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcp_sandbox.config import HttpConfig
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.server.server import SandboxServer
from mcp_sandbox.web.guard import PATH, HttpGuard
from mcp_sandbox.web.in_flight import UserSessions
from mcp_sandbox.web.tokens import Tokens

if TYPE_CHECKING:
    # Loaded only by servers that share chats.
    from mcp_sandbox.web.passing_on import Passing


@dataclass(frozen=True)
class TcpListener:
    """A socket that clients can connect to; `place` is HOST:PORT as they would write it."""

    socket: socket.socket
    place: str

    @property
    def url(self) -> str:
        return f"http://{self.place}{PATH}"


class BoundedProtocol(H11Protocol):
    """One connection. While it asks for nothing, it may have to make room for a newer one."""

    _deadline: Any

    def __init__(self, settings: HttpConfig, **theirs: Any) -> None:  # noqa: ANN401
        super().__init__(**theirs)
        self._most, self._request_s = settings.connections, settings.request_time

    def connection_made(self, transport: object) -> None:
        super().connection_made(cast("Any", transport))
        self._await_head()
        ours = [peer for peer in self.connections if isinstance(peer, BoundedProtocol)]
        alive = [peer for peer in ours if not peer.transport.is_closing()]
        if len(alive) > self._most:
            idle = [peer for peer in alive if not peer._is_answering]  # noqa: SLF001  its own class
            min(idle, key=lambda peer: peer._deadline.when()).transport.abort()  # noqa: SLF001

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._deadline.cancel()
        elif self._deadline.cancelled():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        # Uvicorn has no cycle before the first request, whatever its annotation says.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self._request_s, self.transport.abort)


class HttpServer(uvicorn.Server):
    """An open HTTP server, as a task among others: it leaves signals alone."""

    def __init__(self, guard: HttpGuard, settings: HttpConfig, listener: TcpListener) -> None:
        super().__init__(
            uvicorn.Config(
                cast("Any", guard),
                http=cast("Any", partial(BoundedProtocol, settings)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=16 << 10,
            )
        )
        self.url = listener.url
        self._listener = listener
        self._in_flight = guard.in_flight

    async def run_on(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `should_exit` is set, whatever happens around."""
        self._begun = task_status
        try:
            with anyio.CancelScope(shield=True):
                await self.serve([self._listener.socket])
        finally:
            for connection in [*self.server_state.connections]:
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._begun.started()

    async def drain(self, grace_s: float) -> None:
        """Listen no more, and wait so long for the running calls to finish."""
        for server in self.servers:
            server.close()
        for connection in [*self.server_state.connections]:
            # One that is kept open ends now, or with its answer: the next request connects anew.
            connection.shutdown()
        await self._in_flight.drain(grace_s)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def listen(address: str, *, anonymous: bool = False) -> TcpListener:
    """Take a place to listen, HOST:PORT; port 0 takes any free one.

    Raises ConfigError: it is no such place or cannot be had, or callers without a token would come
    from other machines.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host != bare) or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--http {address!r} is no address: write HOST:PORT, such as 127.0.0.1:8080 "
            "or [::1]:8080"
        )
    try:
        found = await anyio.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"--http {address}: there is no such host ({exc})") from exc
    # Clients try 127.0.0.1 for localhost everywhere, but ::1 not everywhere.
    family, kind, protocol, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if anonymous and not ipaddress.ip_address(place[0].partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--http {address} can be reached from other machines, and "
            "--allow-anonymous-loopback would let everybody in without a token: "
            "listen on 127.0.0.1, or leave that flag out"
        )
    # Without the protocol's number asyncio does not know TCP, and answers wait for Nagle: 40 ms.
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place)
        opened.listen(128)
    except OSError as exc:
        opened.close()
        remedy = "name another port" if exc.errno == errno.EADDRINUSE else "name another address"
        raise ConfigError(f"cannot listen on {address} ({exc.strerror}): {remedy}") from exc
    name = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
    return TcpListener(opened, f"{name}:{opened.getsockname()[1]}")


@asynccontextmanager
async def open_http(  # noqa: PLR0913 - what is handed to the guard
    server: SandboxServer,
    listener: TcpListener,
    settings: HttpConfig,
    *,
    tokens: Tokens,
    anonymous: bool,
    metrics: Callable[[], bytes],
    control: ASGIApp | None = None,
    passing: "Passing | None" = None,
) -> AsyncGenerator[HttpServer]:
    """Serve HTTP while the block runs; what is still served at its end is cancelled and answered.

    `passing` has calls answered by the servers that have their chats. `drain` before the end lets
    calls finish. Raises ConfigError: an allowed host is no host name.
    """
    sessions = UserSessions(server.core, settings)
    app = passing(sessions.handle_request) if passing else sessions.handle_request
    guard = HttpGuard(app, settings, listener.place, tokens, anonymous, metrics, control)
    door = HttpServer(guard, settings, listener)
    async with sessions.run(), anyio.create_task_group() as watching:
        async with anyio.create_task_group() as serving:
            await serving.start(door.run_on)
            watching.start_soon(guard.watch)
            try:
                yield door
            finally:
                with anyio.CancelScope(shield=True):
                    await guard.in_flight.close()
                door.should_exit = True
        watching.cancel_scope.cancel()
