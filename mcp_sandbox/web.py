"""HTTP/1.1 with clients that nobody trusts, under uvicorn: bounded in connections and time."""

from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedProtocol(H11Protocol):
    """One connection. While it asks for nothing, it may have to make room for a newer one."""

    _deadline: Any

    def __init__(self, most: int, request_s: float, **theirs: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(**theirs)
        self._most, self._request_s = most, request_s

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


def bounded(app: object, *, connections: int, request_s: float) -> uvicorn.Config:
    """Return how an ASGI application is served; a request's head must have come in `request_s`."""
    return uvicorn.Config(
        cast("Any", app),
        http=cast("Any", partial(BoundedProtocol, connections, request_s)),
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        # What a client does wrong it is told, and no client fills our log.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=16 << 10,
    )
