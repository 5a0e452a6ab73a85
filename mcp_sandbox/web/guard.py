"""Who may come in over HTTP: every request passes here before anything reads it.

Refuses by the Host and Origin headers, the token, the limits of a user, and the size and time of
the body, which is read as a whole before anything parses it; tells the rest which user and chat a
request belongs to. Knows no tool.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sandbox.config import HttpConfig
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError, TooLarge
from mcp_sandbox.json_size import check_json_size
from mcp_sandbox.models import ChatId, TokenGrant
from mcp_sandbox.server.identity import ANONYMOUS, CALLER, CHAT_HEADER, Caller
from mcp_sandbox.server.transports import find_request_id
from mcp_sandbox.telemetry.metrics import CONTENT_TYPE
from mcp_sandbox.web.in_flight import (
    ConcurrencyLimit,
    InFlight,
    OpenRequest,
    RateLimit,
    RequestRefused,
    refuse_over_limit,
    replay_body,
)
from mcp_sandbox.web.tokens import Tokens

logger = logging.getLogger(__name__)

PATH, CONTROL = "/mcp", "/api/"
# Bodies of files are taken piece by piece, by the route that serves them.
_FILES = "/files"
_USER_HEADER = "mcp-sandbox-user"
_SESSION_HEADER = "mcp-session-id"
_SESSION_ID = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"([a-z0-9_][a-z0-9._-]{0,252}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")


def _list_allowed_names(listens_on: str, allowed: Iterable[str]) -> frozenset[str]:
    """Return a server's names: of loopback, of where it listens, and those the operator allows.

    So no web page reaches it under its own name. A name without a port is allowed with every port.
    """
    for text in allowed:
        if not _HOST.fullmatch(text.lower()):
            raise ConfigError(
                f"http.allowed_hosts: {text!r} is no host name: "
                "write them like sandbox.example.org or sandbox.example.org:8443"
            )
    names = ("localhost", "127.0.0.1", "[::1]", listens_on, *allowed)
    return frozenset(name.lower() for name in names)


@dataclass(eq=False)
class HttpGuard:
    """The outermost application: it refuses a request, or has `app` answer it.

    `listens_on` is HOST:PORT. `anonymous`: a request without a token is the user `local`.
    `metrics`: the text of /metrics. `control` answers what is below /api/.
    """

    app: ASGIApp
    settings: HttpConfig
    listens_on: str
    tokens: Tokens
    anonymous: bool
    metrics: Callable[[], bytes]
    control: ASGIApp | None = None

    def __post_init__(self) -> None:
        self.in_flight = InFlight()
        self._names = _list_allowed_names(self.listens_on, self.settings.allowed_hosts)
        self._rate = RateLimit(self.settings.rate)
        self._at_once = ConcurrencyLimit(self.settings.requests_per_user)
        # Once parsed, a message may take ten times its size until it is answered.
        self._bytes = ConcurrencyLimit(4 * self.settings.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_names(headers)
            if scope["path"] == PATH:
                await self._admit(await self._find_grant(headers), scope, receive, send)
            elif self.control and scope["path"].startswith(CONTROL):
                grant = await self._find_grant(headers)
                await self._admit(grant, scope, receive, send, self.control)
            else:
                await (await self._answer_page(scope, headers))(scope, receive, send)
        except RequestRefused as refused:
            as_problem = scope["path"].startswith(CONTROL)
            await refused.response(as_problem=as_problem)(scope, receive, send)
        except ClientDisconnect:
            logger.debug("a client left before its request had come")

    async def _answer_page(self, scope: Scope, headers: Headers) -> Response:
        if scope["method"] in ("GET", "HEAD"):
            if scope["path"] == "/health":
                return Response("ok\n", headers={"content-type": "text/plain"})
            if scope["path"] == "/metrics":
                await self._find_grant(headers)
                return Response(self.metrics(), headers={"content-type": CONTENT_TYPE})
        raise RequestRefused(HTTPStatus.NOT_FOUND, f"there is nothing here: MCP is at {PATH}")

    async def watch(self) -> None:
        """End what is served to tokens that are revoked or expired meanwhile; never returns."""
        while True:
            await anyio.sleep(1)
            for token_id in self.in_flight.token_ids:
                try:
                    is_valid = await self.tokens.still_valid(token_id)
                except OperatorError as exc:
                    logger.warning("no token can be checked: %s", exc)
                    is_valid = False
                if not is_valid:
                    self._end(token_id)

    def _end(self, token_id: str) -> None:
        self.in_flight.end(_refuse_unauthorized(), lambda entry: entry.token_id == token_id)

    def _check_names(self, headers: Headers) -> None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_allowed(hosts[0]):
            text = "this server is not known by that name: add it to http.allowed_hosts"
            raise RequestRefused(HTTPStatus.MISDIRECTED_REQUEST, text)
        for origin in origins:
            scheme, _, host = origin.partition("://")
            if scheme not in ("http", "https") or not self._is_allowed(host):
                text = "pages of that origin may not ask: add its host to http.allowed_hosts"
                raise RequestRefused(HTTPStatus.FORBIDDEN, text)

    def _is_allowed(self, host: str) -> bool:
        name = _HOST.fullmatch(host.lower())
        return name is not None and not self._names.isdisjoint((name[0], name[1]))

    async def _find_grant(self, headers: Headers) -> TokenGrant:
        sent = headers.getlist("authorization")
        if not sent and self.anonymous:
            return ANONYMOUS
        scheme, _, secret = (sent[0] if len(sent) == 1 else "").partition(" ")
        if scheme.lower() != "bearer":
            raise _refuse_unauthorized()
        try:
            grant = await self.tokens.find(secret.strip())
        except OperatorError as exc:
            logger.warning("no token can be checked: %s", exc)
            text = "the server cannot check tokens now: its log says why"
            raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, text, retry_after="10") from exc
        if grant is None:
            raise _refuse_unauthorized(', error="invalid_token"')
        return grant

    async def _admit(
        self,
        grant: TokenGrant,
        scope: Scope,
        receive: Receive,
        send: Send,
        control: ASGIApp | None = None,
    ) -> None:
        settings, headers = self.settings, Headers(scope=scope)
        _check_scope(grant, controls=control is not None)
        # Those whom a platform serves have their limits each.
        user = _find_steered(grant, headers) if control else grant.user
        if wait_s := self._rate.take(user, anyio.current_time()):
            raise refuse_over_limit(f"more than {settings.rate} requests a second", wait_s)
        # The bytes of a message are held until it is answered.
        with self._at_once.of(user) as begin, self._bytes.of(user) as carry:
            if not begin(1):
                raise refuse_over_limit(
                    f"{settings.requests_per_user} requests of this user are open", 1
                )
            caller = {CALLER: Caller(user, None)} if control else _identify_caller(user, headers)
            entry = OpenRequest(send, grant.token_id or None, _is_stream(scope, headers))
            app = control or self.app
            if not (control and scope["path"].endswith(_FILES)):
                request = Request(scope, receive)
                body = await self._read_body(request, carry, any_kind=control is not None)
                self._rate.charge(user, len(body))
                receive = replay_body(body, receive)
                if control is None and _is_legacy(headers):
                    app = partial(self._serve_legacy, entry, body)
            await self.in_flight.serve(entry, app, {**scope, **caller}, receive)

    async def _serve_legacy(
        self, entry: OpenRequest, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have a request of the older protocol answered, or cancel it when its client has left.

        Newer clients cancel a call by closing its stream. Older ones are meant to say so, or to
        come back for the answer, but nothing keeps answers here.
        """
        try:
            await self.app(scope, receive, send)
        finally:
            has_left = _SESSION_HEADER in Headers(scope=scope) and not entry.done
            if has_left and (request_id := find_request_id(body)) is not None:
                told = {"method": "notifications/cancelled", "params": {"requestId": request_id}}
                message = json.dumps({"jsonrpc": "2.0", **told}).encode()
                with anyio.move_on_after(1, shield=True):
                    await self.app(scope, replay_body(message, _receive_disconnect), _drop_message)

    async def _read_body(
        self, request: Request, carry: Callable[[int], bool], *, any_kind: bool = False
    ) -> bytes:
        """Read the body of a request in time; `carry` is asked for room for each piece."""
        headers, settings, body = request.headers, self.settings, bytearray()
        if request.method != "POST":
            if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
                raise RequestRefused(
                    HTTPStatus.BAD_REQUEST, "this method takes no body: leave it out"
                )
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if not any_kind and kind != "application/json":
            text = "send the message as application/json"
            raise RequestRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        # The parser of HTTP lets only digits through.
        _check_size(int(headers.get("content-length", "0")), settings.max_body)
        try:
            with anyio.fail_after(settings.request_time):
                async for piece in request.stream():
                    if not carry(len(piece)):
                        raise refuse_over_limit(
                            "large messages of this user are still being served", 1
                        )
                    body += piece
                    _check_size(len(body), settings.max_body)
        except TimeoutError as exc:
            limit = f"{settings.request_time:g} s"
            text = f"the request did not come within {limit}: send it again, faster"
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, text) from exc
        if not request.scope["path"].endswith("/upload"):  # It takes a form, and no JSON.
            try:
                check_json_size(body)
            except TooLarge as exc:
                raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(exc)) from exc
        return bytes(body)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        text = f"a message may have {max_bytes:,} bytes: send less at a time (http.max_body)"
        raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)


def _check_scope(grant: TokenGrant, *, controls: bool) -> None:
    if (grant.scope == "mcp") == controls and grant is not ANONYMOUS:
        wanted = "control or platform" if controls else "mcp"
        text = f"this token is of the scope {grant.scope}: use one of the scope {wanted} here"
        raise RequestRefused(HTTPStatus.FORBIDDEN, text)


def _find_steered(grant: TokenGrant, headers: Headers) -> str:
    """Return whose chats a request steers; only a platform's token names another user."""
    named = headers.getlist(_USER_HEADER)
    try:
        chat = ChatId(named[0] if named else grant.user, "any")
    except InvalidArgument as exc:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"header {_USER_HEADER}: {exc}") from exc
    if len(named) != (grant.scope == "platform") and named != [grant.user]:
        text = f"send the header {_USER_HEADER} once with a token of the scope platform, else never"
        raise RequestRefused(HTTPStatus.FORBIDDEN, text)
    return chat.user


def _identify_caller(user: str, headers: Headers) -> dict[str, object]:
    """Return what the server is told of a caller; refuse one whose chat is not usable."""
    named = headers.getlist(CHAT_HEADER)
    if len(named) > 1:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"send the header {CHAT_HEADER} once")
    chat, session_id = None, headers.get(_SESSION_HEADER, "")
    try:
        if named:
            chat = ChatId(user, named[0])
        # Ids are made by the SDK: what cannot be one is answered like any session it does not know.
        elif _is_legacy(headers) and _SESSION_ID.fullmatch(session_id):
            chat = ChatId(user, session_id)
    except InvalidArgument as exc:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, f"header {CHAT_HEADER}: {exc}") from exc
    # The SDK gives a session only to the principal that opened it.
    principal = AuthenticatedUser(AccessToken(token="", client_id=user, scopes=[]))
    return {CALLER: Caller(user, chat), "user": principal}


def _is_stream(scope: Scope, headers: Headers) -> bool:
    if scope["path"] != PATH:
        return bool(scope["path"] == f"{CONTROL}events")
    return scope["method"] == "GET" or headers.get("mcp-method") == "subscriptions/listen"


def _is_legacy(headers: Headers) -> bool:
    return headers.get("mcp-protocol-version") in (None, *HANDSHAKE_PROTOCOL_VERSIONS)


def _refuse_unauthorized(detail: str = "") -> RequestRefused:
    return RequestRefused(
        HTTPStatus.UNAUTHORIZED,
        "a valid token is needed: send `Authorization: Bearer TOKEN` with one that "
        "`mcp-sandbox token add USER` printed",
        www_authenticate=f'Bearer realm="mcp-sandbox"{detail}',
    )


async def _receive_disconnect() -> Message:
    return {"type": "http.disconnect"}


async def _drop_message(_message: Message) -> None:
    """Drop what is sent: the client no longer waits."""
