"""Who may come in over HTTP, and how much: every request passes here before anything reads it.

Refuses by the Host and Origin headers, the token, the limits of a user, and the size and time of
the body; tells the rest which user and chat a request belongs to. Knows no tool.
"""

import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sandbox.config import HttpConfig
from mcp_sandbox.errors import InvalidArgument, OperatorError
from mcp_sandbox.models import ChatId, TokenGrant
from mcp_sandbox.server.body import Gone, read_body, refuse_body, replayed
from mcp_sandbox.server.flow import Flow, Open
from mcp_sandbox.server.hosts import AllowedHosts
from mcp_sandbox.server.identity import ANONYMOUS, CALLER, CHAT_HEADER, Caller
from mcp_sandbox.server.limits import AtOnce, Bytes, Rate
from mcp_sandbox.server.older import SESSION_HEADER, OlderSessions
from mcp_sandbox.server.refusal import Refused, too_many
from mcp_sandbox.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

PATH = "/mcp"
_VERSION_HEADER = "mcp-protocol-version"
_SESSION_ID = re.compile(r"[0-9a-f]{32}")
_LOOK_S = 1.0
# Once parsed, a message may take ten times its size until it is answered.
_LARGE_AT_ONCE = 4
_CHALLENGE = 'Bearer realm="mcp-sandbox"'


class TokenBook(Protocol):
    """Where tokens are looked up, anew for every request."""

    async def find(self, secret: str) -> TokenGrant | None:
        """Return whom a token lets in, if anybody."""
        ...

    async def still_valid(self, token_id: str) -> bool:
        """Say whether a token that was found before still lets in."""
        ...


@dataclass(frozen=True)
class Rules:
    """What a guard goes by.

    `anonymous`: a request without a token is the user `local`. `metrics`: the text of /metrics.
    """

    settings: HttpConfig
    hosts: AllowedHosts
    tokens: TokenBook
    anonymous: bool = False
    metrics: Callable[[], bytes] | None = None


class Guard:
    """The outermost application: it refuses a request, or has `app` answer it."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        settings = rules.settings
        self.flow = Flow()
        self._app = app
        self._rules = rules
        self._rate = Rate(settings.rate)
        self._at_once = AtOnce(settings.requests_per_user)
        self._bytes = Bytes(_LARGE_AT_ONCE * settings.max_body)
        self._older = OlderSessions(app, settings.sessions_per_user)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_names(headers)
            if scope["path"] == PATH:
                await self._admit(await self._granted(headers), scope, receive, send)
            else:
                kind, text = await self._page(scope, headers)
                await _show(kind, text, send)
        except Refused as refused:
            await refused.answer(send)
        except Gone:
            logger.debug("a client left before its request had come")

    async def _page(self, scope: Scope, headers: Headers) -> tuple[str, bytes]:
        if scope["method"] in ("GET", "HEAD"):
            if scope["path"] == "/health":
                return "text/plain", b"ok\n"
            if scope["path"] == "/metrics" and self._rules.metrics is not None:
                await self._granted(headers)
                return CONTENT_TYPE, self._rules.metrics()
        raise Refused(HTTPStatus.NOT_FOUND, f"there is nothing here: MCP is at {PATH}")

    async def watch(self) -> None:
        """End what is served to tokens that are revoked or expired meanwhile; never returns."""
        while True:
            await anyio.sleep(_LOOK_S)
            for token_id in self.flow.token_ids:
                if not await self._still_valid(token_id):
                    self._end(token_id)

    def _end(self, token_id: str) -> None:
        self.flow.end(_unauthorized(), lambda entry: entry.token_id == token_id)

    def _check_names(self, headers: Headers) -> None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._rules.hosts.allows_host(hosts[0]):
            text = "this server is not known by that name: add it to http.allowed_hosts"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, text)
        if not all(self._rules.hosts.allows_origin(origin) for origin in origins):
            text = "pages of that origin may not ask: add its host to http.allowed_hosts"
            raise Refused(HTTPStatus.FORBIDDEN, text)

    async def _granted(self, headers: Headers) -> TokenGrant:
        sent = headers.getlist("authorization")
        if not sent and self._rules.anonymous:
            return ANONYMOUS
        scheme, _, secret = (sent[0] if len(sent) == 1 else "").partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthorized()
        try:
            grant = await self._rules.tokens.find(secret.strip())
        except OperatorError as exc:
            logger.warning("no token can be checked: %s", exc)
            text = "the server cannot check tokens now: its log says why"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, text, retry_after_s=10) from exc
        if grant is None:
            raise _unauthorized('error="invalid_token"')
        return grant

    async def _still_valid(self, token_id: str) -> bool:
        try:
            return await self._rules.tokens.still_valid(token_id)
        except OperatorError as exc:
            logger.warning("no token can be checked: %s", exc)
            return False

    async def _admit(self, grant: TokenGrant, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = self._rate.take(grant.user, anyio.current_time())
        if wait_s:
            raise too_many(f"more than {self._rules.settings.rate} requests a second", wait_s)
        if not self._at_once.enter(grant.user):
            limit = self._rules.settings.requests_per_user
            raise too_many(f"{limit} requests of this user are open", 1)
        try:
            await self._read_and_serve(grant, scope, receive, send)
        finally:
            self._at_once.leave(grant.user)

    async def _read_and_serve(
        self, grant: TokenGrant, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = Headers(scope=scope)
        known = {**scope, **_known_as(grant.user, headers)}
        with self._carried(grant.user) as count:
            body = await self._body(scope["method"], headers, receive, count)
            self._rate.charge(grant.user, len(body))
            await self._serve(grant, body, known, receive, send)

    @contextmanager
    def _carried(self, user: str) -> Generator[Callable[[int], None]]:
        """Count the bytes of a user's message, which are held until it is answered."""
        carried = 0

        def count(size: int) -> None:
            nonlocal carried
            if not self._bytes.add(user, size):
                raise too_many("large messages of this user are still being served", 1)
            carried += size

        try:
            yield count
        finally:
            self._bytes.remove(user, carried)

    async def _serve(
        self, grant: TokenGrant, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, app = Headers(scope=scope), self._app
        if _is_older_era(headers):
            app = partial(self._older.serve, grant.user, body)
        entry = Open(grant.token_id or None, _is_stream(scope["method"], headers))
        await self.flow.serve(entry, app, scope, replayed(body, receive), send)

    async def _body(
        self, method: str, headers: Headers, receive: Receive, count: Callable[[int], None]
    ) -> bytes:
        if method != "POST":
            refuse_body(headers)
            return b""
        settings = self._rules.settings
        limits = settings.max_body, settings.request_time
        return await read_body(headers, receive, *limits, count=count)


def _known_as(user: str, headers: Headers) -> dict[str, object]:
    """What the rest of the server is told of a caller.

    Raises:
        Refused: the chat that is named is not usable.
    """
    named = headers.getlist(CHAT_HEADER)
    if len(named) > 1:
        raise Refused(HTTPStatus.BAD_REQUEST, f"send the header {CHAT_HEADER} once")
    try:
        chat = ChatId(user, named[0]) if named else _chat_of_session(user, headers)
    except InvalidArgument as exc:
        raise Refused(HTTPStatus.BAD_REQUEST, f"header {CHAT_HEADER}: {exc}") from exc
    # The SDK gives a session only to the principal that opened it.
    principal = AuthenticatedUser(AccessToken(token="", client_id=user, scopes=[]))
    return {CALLER: Caller(user, chat), "user": principal}


def _chat_of_session(user: str, headers: Headers) -> ChatId | None:
    session_id = headers.get(SESSION_HEADER)
    if session_id is None or not _is_older_era(headers):
        return None
    # Ids are made by the SDK: what cannot be one is answered like any session it does not know.
    return ChatId(user, session_id) if _SESSION_ID.fullmatch(session_id) else None


def _is_older_era(headers: Headers) -> bool:
    return headers.get(_VERSION_HEADER) in (None, *HANDSHAKE_PROTOCOL_VERSIONS)


def _is_stream(method: str, headers: Headers) -> bool:
    return method == "GET" or headers.get("mcp-method") == "subscriptions/listen"


def _unauthorized(detail: str = "") -> Refused:
    return Refused(
        HTTPStatus.UNAUTHORIZED,
        "a valid token is needed: send `Authorization: Bearer TOKEN` with one that "
        "`mcp-sandbox token add USER` printed",
        challenge=", ".join(filter(None, [_CHALLENGE, detail])),
    )


async def _show(kind: str, text: bytes, send: Send) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await send({"type": "http.response.body", "body": text})
