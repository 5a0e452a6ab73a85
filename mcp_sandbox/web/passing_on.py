"""Passes calls on to the server that has their chat: by HTTP, streamed both ways, one hop.

What is passed on is marked, with all that its client has sent, the token too: the other server
checks that as this one has. A call whose server cannot be found or reached is answered here, where
the chat's lease lets it in, or says why not.
"""

import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import anyio
import httpx2
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import CALLER
from mcp_sandbox.storage.leases import Leases
from mcp_sandbox.web.in_flight import OpenRequest, RequestRefused, replay_body

logger = logging.getLogger(__name__)

# Puts the hop in front of an application. Unless the guard knows it, the second argument says which
# chat a request is about, by its scope and body.
Passing = Callable[..., ASGIApp]
ChatOf = Callable[[Scope, bytes], Awaitable[ChatId | None]]

_PASSED_ON, _SESSION = "mcp-sandbox-passed-on", "mcp-session-id"
# Servers keep a silent connection a little longer: one that is being closed fails a request.
_CONNECT_S, _IDLE_S = 0.5, 2.0
_LOOK_AGAIN_S = 0.2
# A machine that is cut off closes nothing: its kernel is asked after 5 s, and has 5 s to answer.
_NOTICE_LOSS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)
# About one connection, or judged here already.
_HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"origin", b"date", b"expect"),
}


@asynccontextmanager
async def open_passing(leases: Callable[[], Awaitable[Leases]]) -> AsyncGenerator[Passing]:
    """Open the connections to other servers, while the block runs."""
    limits = httpx2.Limits(max_keepalive_connections=64, keepalive_expiry=_IDLE_S)
    timeout = httpx2.Timeout(None, connect=_CONNECT_S)

    def make() -> httpx2.AsyncClient:
        # It loads the authorities of this machine.
        transport = httpx2.AsyncHTTPTransport(limits=limits, socket_options=_NOTICE_LOSS)
        return httpx2.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    async with await to_thread.run_sync(make) as http:
        http.headers.clear()
        yield partial(_PassingOn, http, leases)


@dataclass(eq=False)
class _PassingOn:
    """Has `app` answer what is about no chat of another server."""

    http: httpx2.AsyncClient
    leases: Callable[[], Awaitable[Leases]]
    app: ASGIApp
    chat_of: ChatOf | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of what is no file, the guard has read all.
        is_file = scope["path"].endswith("/files")
        body = b"" if is_file else (await receive()).get("body", b"")
        until_s = None
        while url := await self._find(scope, body):
            if await self._pass_on(url, scope, body, receive, OpenRequest(send, None, False)):
                return
            until_s = until_s or anyio.current_time() + (await self.leases()).wait_s
            if anyio.current_time() >= until_s:
                break
            await anyio.sleep(_LOOK_AGAIN_S)
        await self.app(scope, receive if is_file else replay_body(body, receive), send)

    async def _find(self, scope: Scope, body: bytes) -> str | None:
        headers = Headers(scope=scope)
        try:
            chat = await self.chat_of(scope, body) if self.chat_of else scope[CALLER].chat
            if chat and _PASSED_ON not in headers:
                # A session of the older protocol is in the memory of one server.
                return await (await self.leases()).find(chat, may_place=_SESSION not in headers)
        except SandboxError as exc:
            logger.debug("answered here, which says why it cannot be: %s", exc)
        return None

    async def _pass_on(
        self, url: str, scope: Scope, body: bytes, receive: Receive, answer: OpenRequest
    ) -> bool:
        """Return False if that server cannot be reached: nothing was sent then."""
        failure, is_upload = None, scope["method"] == "PUT"
        content = Request(scope, receive).stream() if is_upload else body or None
        async with anyio.create_task_group() as tasks:
            if not is_upload:
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
            try:
                await self._relay(url, scope, content, answer.answer)
            except (httpx2.TransportError, ClientDisconnect) as exc:
                failure = exc
            tasks.cancel_scope.cancel()
        if isinstance(failure, httpx2.ConnectError | httpx2.ConnectTimeout):
            logger.warning("the server at %s cannot be reached: %s", url, failure)
            return False
        if failure and not answer.begun:
            text = (
                f"the server at {url}, which has this chat, went away ({failure!r}): what was "
                "asked may have been done, so look before you ask again"
            )
            raise RequestRefused(HTTPStatus.BAD_GATEWAY, text, retry_after="1")
        if failure:
            # The connection is closed before its end, so that a part is not taken for the whole.
            raise ClientDisconnect
        return True

    async def _relay(
        self, url: str, scope: Scope, content: AsyncIterable[bytes] | bytes | None, send: Send
    ) -> None:
        query = scope["query_string"].decode("latin-1")
        target = f"{url}{scope['raw_path'].decode('latin-1')}{query and '?'}{query}"
        headers = [*_keep_end_to_end(scope["headers"]), (_PASSED_ON.encode(), b"1")]
        asked = self.http.stream(scope["method"], target, headers=headers, content=content)
        async with asked as response:
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": _keep_end_to_end(response.headers.raw)})
            async for data in response.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _keep_end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOP_HEADERS]


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """End the hop when its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
