"""The HTTP requests that are being served: how much one user may, and how they are ended."""

import json
import math
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import INVALID_REQUEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sandbox.config import HttpConfig

_FINISH_S = 1.0
# Named here so that an SDK that calls it otherwise fails at once, and lifts no limit.
_admit = StreamableHTTPSessionManager._admit_session  # noqa: SLF001


class RequestRefused(Exception):
    """A request is not served; `text` says why and what to do next."""

    def __init__(self, status: HTTPStatus, text: str, **headers: str) -> None:
        super().__init__(text)
        self._status = status
        self._headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self, *, as_problem: bool = False) -> Response:
        """Return an error that closes the connection: the request is not read on.

        It is one of JSON-RPC, or a problem document (RFC 9457).
        """
        error: dict[str, object] = {"code": INVALID_REQUEST, "message": str(self)}
        body: dict[str, object] = {"jsonrpc": "2.0", "id": None, "error": error}
        if as_problem:
            body = {"title": self._status.phrase, "status": self._status, "detail": str(self)}
        kind = "application/problem+json" if as_problem else "application/json"
        headers = {"content-type": kind, "connection": "close", **self._headers}
        return Response(json.dumps(body), self._status, headers)


def refuse_over_limit(what: str, wait_s: int) -> RequestRefused:
    """Return the refusal of a user over a limit, who may try again after so many seconds."""
    text = f"too much at once ({what}): wait and try again"
    return RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, text, retry_after=str(wait_s))


def _refuse_while_ending() -> RequestRefused:
    text = "the server is ending and takes no further request: try again in a moment"
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, text, retry_after="1")


class RateLimit:
    """So many requests a second for each user, counted over ten seconds."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._most = per_second * 10.0
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, user: str, now: float) -> int:
        """Count a request; returns 0, or after how many seconds it may come again."""
        left, when = self._left.get(user, (self._most, now))
        left = min(self._most, left + (now - when) * self._per_second)
        if left < 1:
            self._left[user] = left, now
            return max(1, math.ceil((1 - left) / self._per_second))
        self._left[user] = left - 1, now
        return 0

    def charge(self, user: str, size: int) -> None:
        """Count a message that was taken as more requests, for its bytes; what comes next waits.

        One message costs at most what may come in ten seconds.
        """
        left, when = self._left[user]
        # Parsing 64 KiB takes about as long as serving a small request.
        self._left[user] = left - min(self._most, size // (64 << 10)), when


class ConcurrencyLimit:
    """So much at the same time for each user."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = Counter[str]()

    @contextmanager
    def of(self, user: str) -> Generator[Callable[[int], bool]]:
        """Yield a function that takes more if there is room; the block's end gives all back."""
        carried = 0

        def take(count: int) -> bool:
            nonlocal carried
            if self._taken[user] + count > self._limit:
                return False
            self._taken[user] += count
            carried += count
            return True

        try:
            yield take
        finally:
            self._taken[user] -= carried
            if not self._taken[user]:
                del self._taken[user]


class UserSessions(StreamableHTTPSessionManager):
    """The SDK's Streamable HTTP; of sessions, which older clients have, so many for each user."""

    def __init__(self, core: Server[Any], settings: HttpConfig) -> None:
        super().__init__(core, max_request_body_size=settings.max_body)
        self._most = settings.sessions_per_user

    def _admit_session(
        self, principal: AuthorizationContext | None
    ) -> StreamableHTTPServerTransport | None:
        if sum(owner == principal for owner in self._session_owners.values()) >= self._most:
            raise refuse_over_limit(f"{self._most} sessions of this user are open: end one", 60)
        return _admit(self, principal)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a channel that gives a body that was read already, then what else comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


@dataclass(eq=False)
class OpenRequest:
    """A request that is being served. A stream lasts as long as its client likes."""

    send: Send
    token_id: str | None
    is_stream: bool
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    why: RequestRefused | None = None
    begun: bool = False
    done: bool = False

    async def answer(self, message: Message) -> None:
        self.begun = True
        self.done = message["type"] == "http.response.body" and not message.get("more_body")
        await self.send(message)


class InFlight:
    """Every request that is being served."""

    def __init__(self) -> None:
        self._open: set[OpenRequest] = set()
        self._left = anyio.Event()
        self._draining = False

    @property
    def token_ids(self) -> set[str]:
        return {entry.token_id for entry in self._open if entry.token_id is not None}

    async def serve(self, entry: OpenRequest, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Let the application answer a request, until it has or is told to end.

        Raises RequestRefused: it was ended before an answer began.
        """
        if self._draining:
            raise _refuse_while_ending()
        self._open.add(entry)
        try:
            with entry.scope:
                await app(scope, receive, entry.answer)
            if entry.why is not None and not entry.begun:
                raise entry.why
            if entry.why is not None and not entry.done:
                with anyio.move_on_after(_FINISH_S, shield=True):
                    await entry.answer({"type": "http.response.body", "body": b""})
        finally:
            self._open.discard(entry)
            self._left.set()

    def end(self, why: RequestRefused, which: Callable[[OpenRequest], bool]) -> None:
        """Cancel some of the requests; their clients learn why if nothing was answered yet."""
        for entry in self._open:
            if entry.why is None and which(entry):
                entry.why = why
                entry.scope.cancel()

    async def drain(self, grace_s: float) -> None:
        """Take no further request, end the streams, and wait so long for the calls to finish."""
        self._draining = True
        self.end(_refuse_while_ending(), lambda entry: entry.is_stream)
        with anyio.move_on_after(grace_s):
            await self._wait_until_empty()

    async def close(self) -> None:
        """Take no further request and cancel every one that is left."""
        await self.drain(0)
        self.end(_refuse_while_ending(), lambda _: True)
        with anyio.move_on_after(_FINISH_S, shield=True):
            await self._wait_until_empty()

    async def _wait_until_empty(self) -> None:
        while self._open:
            self._left = anyio.Event()
            await self._left.wait()
