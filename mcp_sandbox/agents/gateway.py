"""The way of one run to its model. The program inside knows a token; the key is put in here.

A request is read whole by a library, judged and written anew; an answer passes as it comes.
"""

import logging
import secrets
import socket
import ssl
from asyncio import get_running_loop  # noqa: TID251 - uvicorn's connections are asyncio's
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import anyio
import httpx2
from anyio import CancelScope, to_thread
from anyio.abc import ByteStream
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mcp_sandbox.agents.connectors import Connector
from mcp_sandbox.agents.requests import MOST_BODY, Counts, Refusal, Usage, judged
from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.config import EgressConfig, RunConfig
from mcp_sandbox.egress.authority import trusted
from mcp_sandbox.egress.masking import Mask
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.web import bounded

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS, _MOST_AT_ONCE = 64, 8
# For the head of a request, and for its body; to reach the service; to end what is under way.
_REQUEST_S, _DIAL_S, _END_S = 60.0, 30.0, 5.0
_SILENT_S = 600.0
_LET_THROUGH = {
    "anthropic": ("POST /v1/messages", "POST /v1/messages/count_tokens", "GET /v1/models"),
    "openai": ("POST /v1/chat/completions", "POST /v1/responses", "GET /v1/models"),
}
_GOING = ("accept", "user-agent", "x-app", "anthropic-version", "anthropic-beta", "openai-beta")
_COMING = ("content-type", "retry-after", "request-id")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


@asynccontextmanager
async def open_gateway(
    connector: Connector,
    *,
    chat: ChatId,
    limits: RunConfig,
    egress: EgressConfig | None = None,
    silent_s: float = _SILENT_S,
) -> AsyncGenerator["Gateway"]:
    """Open the way of a run to a model service while the block lasts.

    `egress` says how this machine reaches the network. A service that is silent for `silent_s` is
    given up, and so is a client that takes longer for a request.

    Raises:
        OperatorError: the key cannot be had, or `egress` cannot be used.
    """
    await connector.key()
    # It reads certificates, and its library imports itself late.
    client = await to_thread.run_sync(_client, connector.url, egress or EgressConfig(), silent_s)
    async with client:
        gateway = Gateway(connector, client, chat, limits, min(_REQUEST_S, silent_s))
        try:
            yield gateway
        finally:
            with CancelScope(deadline=anyio.current_time() + _END_S, shield=True):
                await gateway.end()


def _client(url: str, egress: EgressConfig, silent_s: float) -> httpx2.AsyncClient:
    outside: dict[str, Any] = {"verify": False}
    if url.startswith("https:"):  # Else the service is on this machine.
        certificates = trusted(egress.ca_bundle).decode("ascii")
        outside["verify"] = ssl.create_default_context(cadata=certificates)
        outside["proxy"] = egress.upstream_proxy or None
    timeout = httpx2.Timeout(silent_s, connect=_DIAL_S, pool=None)
    return httpx2.AsyncClient(timeout=timeout, trust_env=False, **outside)


class Gateway:
    """The way of one run. `token` stands inside for the key, and is good here alone."""

    def __init__(
        self,
        connector: Connector,
        client: httpx2.AsyncClient,
        chat: ChatId,
        limits: RunConfig,
        request_s: float,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.counts = Counts()
        self._connector, self._client = connector, client
        self._chat, self._limits, self._request_s = chat, limits, request_s
        self._places = anyio.Semaphore(_MOST_AT_ONCE)
        self._open = True
        self._served = ServerState()
        self._http = bounded(self.answer, connections=_MOST_CONNECTIONS, request_s=request_s)
        self._http.load()

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection from inside until either side ends it."""
        if not self._open:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        protocol = partial(
            cast("Any", self._http.http_protocol_class),
            config=self._http,
            server_state=self._served,
            app_state={},
        )
        await get_running_loop().connect_accepted_socket(protocol, theirs)
        async with SocketStream(ours) as wire, anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, stream, wire)
            await _copy(wire, stream)
            tasks.cancel_scope.cancel()

    async def end(self) -> None:
        """Cut every connection, and wait until no request is under way."""
        self._open = False
        for connection in [*self._served.connections]:
            connection.transport.abort()
        for _ in range(_MOST_AT_ONCE):
            await self._places.acquire()
        event(logger, "model", chat=str(self._chat), to=self._connector.name, **asdict(self.counts))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application does."""
        request = Request(scope, receive)
        try:
            await self._pass_on(request, send)
        except* ClientDisconnect:
            pass
        except* Refusal as group:
            await _refused(cast("Refusal", group.exceptions[0]))(scope, receive, send)

    async def _pass_on(self, request: Request, send: Send) -> None:
        """Answer a request, by the service if it may go there. Raises Refusal."""
        if (path := self._admitted(request)) == "/":
            await Response()(request.scope, request.receive, send)
            return
        async with self._places:
            body = b""
            if request.method == "POST":
                body = judged(await self._body(request), self._connector, self._chat)
            try:
                key = await self._connector.key()
            except OperatorError as exc:
                logger.warning("%s", exc)
                raise Refusal(403, "the key cannot be had; a person must look") from exc
            self._spend(len(body))
            query = str(request.scope["query_string"], "ascii")
            place = self._connector.address(path) + (f"?{query}" if query else "")
            headers = self._headers(request, key.decode("ascii"))
            answering = self._client.stream(request.method, place, headers=headers, content=body)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait_gone, request.receive, tasks.cancel_scope)
                await self._exchange(answering, Mask([key]), send)
                tasks.cancel_scope.cancel()

    def _admitted(self, request: Request) -> str:
        """Return the path, if a request may be made at all. Raises Refusal."""
        headers, path = request.headers, str(request.scope["raw_path"], "ascii")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise Refusal(400, "the body has two lengths")
        asked = f"{request.method} {path}"
        if asked == "HEAD /":
            return path
        given = headers.get("x-api-key") or headers.get("authorization", "")[len("Bearer ") :]
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            raise Refusal(401, "this is not the token of this run")
        if asked not in (known := _LET_THROUGH[self._connector.protocol]):
            raise Refusal(404, f"only these can be asked: {', '.join(known)}")
        return path

    async def _body(self, request: Request) -> bytearray:
        """Return the whole body. Raises Refusal, ClientDisconnect."""
        body, announced = bytearray(), int(request.headers.get("content-length", 0))
        try:
            with anyio.fail_after(self._request_s):
                async for piece in request.stream():
                    body += piece
                    if max(announced, len(body)) > MOST_BODY:
                        raise Refusal(413, f"the body has more than {MOST_BODY:,} bytes")
        except TimeoutError as exc:
            raise Refusal(408, f"the body did not come within {self._request_s:g} s") from exc
        return body

    def _spend(self, size: int) -> None:
        """Count one more request. Raises Refusal: the run has had all that it may."""
        for name, used in (
            ("max_requests", self.counts.requests),
            ("max_output_tokens", self.counts.output_tokens),
        ):
            if used >= (most := getattr(self._limits, name)):
                raise Refusal(403, f"this run has used all of agents.run.{name}, {most:,}")
        self.counts.requests += 1
        self.counts.sent += size

    def _headers(self, request: Request, key: str) -> dict[str, str]:
        given = ((name, request.headers.get(name, "")) for name in _GOING)
        going = {name: value for name, value in given if value and value.isascii()}
        bearer = self._connector.auth == "bearer"
        auth = {"authorization": f"Bearer {key}"} if bearer else {"x-api-key": key}
        return {**going, **auth, "content-type": "application/json", "accept-encoding": "identity"}

    async def _exchange(
        self, answering: AbstractAsyncContextManager[httpx2.Response], mask: Mask, send: Send
    ) -> None:
        """Pass the service's answer on as it comes. Raises Refusal: none has begun."""
        name, usage, begun, whole = self._connector.name, Usage(self.counts), False, False
        try:
            async with answering as response:
                status = response.status_code
                if response.is_redirect:
                    what = f"the service leads elsewhere: correct connectors.{name}.url"
                    raise Refusal(status, what)
                headers = [
                    (key.encode(), mask.text(value.encode()))
                    for key, value in response.headers.items()
                    if key in _COMING or key.startswith("anthropic-")
                ]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                begun = True
                async for piece in response.aiter_bytes():
                    usage.feed(piece)
                    part = {"body": mask.text(piece, more=True), "more_body": True}
                    await send({"type": "http.response.body", **part})
                whole = True
                await send({"type": "http.response.body", "body": mask.text(b"")})
        except httpx2.RequestError as exc:
            # Without an end of what has begun, the client's connection is cut off likewise.
            why = f"the model service of connector {name} failed: {type(exc).__name__}"
            logger.warning("%s", why)
            if not begun:
                late = isinstance(exc, httpx2.TimeoutException)
                raise Refusal(504 if late else 502, why) from exc
        finally:
            if not whole:
                usage.cut()


async def _wait_gone(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _refused(refusal: Refusal) -> JSONResponse:
    """As both protocols tell an error."""
    kind = _KINDS.get(refusal.status, "api_error")
    error = {"type": kind, "message": f"mcp-sandbox: {refusal}", "param": None, "code": None}
    told = {"type": "error", "error": error}
    return JSONResponse(told, refusal.status, headers={"connection": "close"})


async def _copy(source: ByteStream, sink: ByteStream) -> None:
    """Copy until either has ended, and pass the end on."""
    with suppress(*_HUNG_UP):
        async for data in source:
            await sink.send(data)
    with suppress(*_HUNG_UP):
        await sink.send_eof()
