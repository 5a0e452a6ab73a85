"""Uvicorn as a part of our program: it bounds its connections and leaves signals alone.

By itself it bounds neither their number nor how long a peer may say nothing.
"""

import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcp_sandbox.config import HttpConfig

_HEAD_BYTES = 16 << 10
_LEAVE_S = 2


class HttpSettings(uvicorn.Config):
    """Uvicorn's settings, and beside them what a connection may take."""

    def __init__(self, app: ASGIApp, settings: HttpConfig) -> None:
        super().__init__(
            cast("Any", app),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_LEAVE_S,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        self.connections = settings.connections
        self.request_s = settings.request_time


class BoundedProtocol(H11Protocol):
    """One connection. While it asks for nothing, it may have to make room for a newer one."""

    config: HttpSettings
    _since = 0.0
    _deadline: Any = None

    def connection_made(self, transport: object) -> None:
        super().connection_made(cast("Any", transport))
        self._await_head()
        if len(self.connections) > self.config.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._forget_deadline()
        elif self._deadline is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        # Uvicorn has no cycle before the first request, whatever its annotation says.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(self.config.request_s, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        ours = [peer for peer in self.connections if isinstance(peer, BoundedProtocol)]
        alive = [peer for peer in ours if not peer.transport.is_closing()]
        if len(alive) > self.config.connections:
            idle = [peer for peer in alive if not peer._is_answering]  # noqa: SLF001  its own class
            min(idle, key=lambda peer: peer._since).transport.abort()  # noqa: SLF001


class HttpServer(uvicorn.Server):
    """Uvicorn as a task among others: it leaves signals alone, and tells when it has begun."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ready = anyio.Event()
        self._ended = anyio.Event()

    async def run_on(
        self,
        sockets: Sequence[socket.socket],
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until `leave` is called, whatever happens around."""
        self._started = task_status
        try:
            with anyio.CancelScope(shield=True):
                await self.serve([*sockets])
        finally:
            for connection in [*self.server_state.connections]:
                connection.transport.abort()
            self._ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._started.started()

    def stop_listening(self) -> None:
        """Free the address; connections that are open stay so."""
        for server in self.servers:
            server.close()

    async def leave(self) -> None:
        """Close the listener and the connections; returns when it has."""
        self.should_exit = True
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
