"""Streamable HTTP: the SDK's application behind our guard, under uvicorn, as one block.

TLS, where it is wanted, is the work of a proxy in front.
"""

import errno
import ipaddress
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from mcp_sandbox.config import HttpConfig
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.server.flow import Flow
from mcp_sandbox.server.guard import PATH, Guard, Rules, TokenBook
from mcp_sandbox.server.hosts import AllowedHosts
from mcp_sandbox.server.older import SESSION_IDLE_S
from mcp_sandbox.server.peers import HttpServer, HttpSettings
from mcp_sandbox.server.server import SandboxServer

_BACKLOG = 128


@dataclass(frozen=True)
class Listener:
    """A socket that clients can connect to; `host` is as they would write it."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where MCP is."""
        return f"http://{self.host}:{self.port}{PATH}"


@dataclass(frozen=True)
class HttpDoor:
    """An open HTTP server."""

    url: str
    _flow: Flow
    _server: HttpServer

    async def drain(self, grace_s: float) -> None:
        """Listen no more, and wait so long for the running calls to finish."""
        self._server.stop_listening()
        await self._flow.drain(grace_s)


async def listen(address: str, *, anonymous: bool = False) -> Listener:
    """Take a place to listen, HOST:PORT; port 0 takes any free one.

    Raises:
        ConfigError: it is no such place or cannot be had, or callers without a token would come
            from other machines.
    """
    host, port = _parsed(address)
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
        opened.listen(_BACKLOG)
    except OSError as exc:
        opened.close()
        remedy = "name another port" if exc.errno == errno.EADDRINUSE else "name another address"
        raise ConfigError(f"cannot listen on {address} ({exc.strerror}): {remedy}") from exc
    name = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
    return Listener(opened, name, opened.getsockname()[1])


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host != bare) or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--http {address!r} is no address: write HOST:PORT, such as 127.0.0.1:8080 "
            "or [::1]:8080"
        )
    return bare, int(port)


@asynccontextmanager
async def open_http(
    server: SandboxServer,
    listener: Listener,
    settings: HttpConfig,
    *,
    tokens: TokenBook,
    anonymous: bool = False,
    metrics: Callable[[], bytes] | None = None,
) -> AsyncGenerator[HttpDoor]:
    """Serve HTTP while the block runs; what is still served at its end is cancelled and answered.

    `drain` before the end lets calls finish.

    Raises:
        ConfigError: an allowed host is no host name.
    """
    hosts = AllowedHosts(f"{listener.host}:{listener.port}", settings.allowed_hosts)
    sessions = server.http_sessions(max_body=settings.max_body, idle_s=SESSION_IDLE_S)
    guard = Guard(
        sessions.handle_request,
        Rules(settings, hosts, tokens, anonymous=anonymous, metrics=metrics),
    )
    async with sessions.run(), anyio.create_task_group() as tasks:
        uvicorn_server = HttpServer(HttpSettings(guard, settings))
        await tasks.start(uvicorn_server.run_on, [listener.socket])
        tasks.start_soon(guard.watch)
        try:
            yield HttpDoor(listener.url, guard.flow, uvicorn_server)
        finally:
            with anyio.CancelScope(shield=True):
                await guard.flow.close()
                await uvicorn_server.leave()
            tasks.cancel_scope.cancel()
