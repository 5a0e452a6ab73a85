"""An HTTP server of ours on a free port, and clients that speak to it."""

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio import to_thread
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from mcp_sandbox.config import HttpConfig
from mcp_sandbox.models import ChatId, ExecResult
from mcp_sandbox.server.identity import ChatOf, Request, make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.server.skills.visible import VisibleSkills
from mcp_sandbox.web.tokens import TokenFile, TokenInfo, Tokens
from mcp_sandbox.web.uvicorn_server import HttpServer, listen, open_http
from tests.server.scripted import ScriptedSession

# Loading the authorities of this machine takes a client longer than all that it asks.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
MODERN = "2026-07-28"
LEGACY = "2025-11-25"
JSON = {"content-type": "application/json", "accept": "application/json, text/event-stream"}


def http_client(**options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(verify=_NO_TLS, **options)


@dataclass
class Computers:
    """The sessions of all chats: `echo` answers at once, any other command waits for `release`."""

    chats: list[ChatId] = field(default_factory=list)
    begun: anyio.Event = field(default_factory=anyio.Event)
    cancelled: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)

    async def session(self, chat: ChatId) -> Any:
        self.chats.append(chat)

        async def answer(command: str = "", *_: Any, on_output: Any = None, **__: Any) -> Any:
            if command != "echo":
                await self._wait(on_output)
            return ExecResult(f"{chat}\n", "", 0, 1)

        return ScriptedSession(answer)

    async def _wait(self, on_output: Any) -> None:
        if on_output is not None:
            await on_output("stdout", b"begun\n")
        self.begun.set()
        try:
            await self.release.wait()
        finally:
            if not self.release.is_set():
                self.cancelled.set()


@dataclass
class Web:
    """A running server, and where its tokens are."""

    door: HttpServer
    computers: Computers
    data_root: Path

    @property
    def port(self) -> int:
        return httpx2.URL(self.door.url).port or 0

    @property
    def origin(self) -> str:
        return self.door.url.removesuffix("/mcp")

    async def token(self, user: str, lifetime_s: float | None = None) -> tuple[TokenInfo, str]:
        return await to_thread.run_sync(TokenFile(self.data_root).add, user, lifetime_s)

    async def revoke(self, token: TokenInfo) -> None:
        await to_thread.run_sync(TokenFile(self.data_root).revoke, token.id)

    async def headers(self, user: str = "alice", **more: str) -> dict[str, str]:
        """The headers that this user's client sends."""
        _, secret = await self.token(user)
        return {"Authorization": f"Bearer {secret}", **more}

    @asynccontextmanager
    async def client(
        self, mode: Any, headers: Mapping[str, str], **more: Any
    ) -> AsyncGenerator[Client]:
        """The SDK's client, in one of the eras."""
        async with connected(self.door.url, mode, headers, **more) as client:
            yield client

    async def post(self, headers: Mapping[str, str], message: Any = None) -> httpx2.Response:
        """One message as a raw request."""
        async with http_client() as client:
            body = ping() if message is None else message
            return await client.post(self.door.url, headers={**JSON, **headers}, json=body)

    @asynccontextmanager
    async def peer(self) -> AsyncGenerator[tuple[SocketStream, BufferedByteReceiveStream]]:
        """A connection that speaks no HTTP by itself."""
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            yield stream, BufferedByteReceiveStream(stream)


@asynccontextmanager
async def connected(
    url: str, mode: Any, headers: Mapping[str, str], **more: Any
) -> AsyncGenerator[Client]:
    async with http_client(headers=dict(headers), timeout=30) as http:
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode, **more) as client:
            yield client


def ping() -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {}}


def initialize() -> dict[str, Any]:
    about = {"name": "raw", "version": "1"}
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": about}
    return {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}


def call(command: str) -> dict[str, Any]:
    params = {"name": "exec", "arguments": {"command": command}}
    return {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}


def nobody(_request: Request) -> ChatId:
    raise AssertionError("nobody calls but over HTTP")


@asynccontextmanager
async def served(
    data_root: Path,
    *,
    anonymous: bool = False,
    address: str = "127.0.0.1:0",
    other: ChatOf = nobody,
    skills: VisibleSkills | None = None,
    **settings: Any,
) -> AsyncGenerator[Web]:
    """Serve scripted sessions over HTTP; all of it must be over in half a minute."""
    computers = Computers()
    server = build_server(make_session_finder(other, computers.session), skills=skills)
    with anyio.fail_after(30):
        listener = await listen(address, anonymous=anonymous)
        with closing(listener.socket):
            async with open_http(
                server,
                listener,
                HttpConfig(**settings),
                tokens=Tokens(data_root),
                anonymous=anonymous,
                metrics=lambda: b"figures 1\n",
            ) as door:
                yield Web(door, computers, data_root)
