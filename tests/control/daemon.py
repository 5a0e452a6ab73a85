"""A real daemon that serves the control API, and clients of it."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio import to_thread

from mcp_sandbox.models import TokenScope
from mcp_sandbox.web.tokens import TokenFile
from tests.daemon.running import Daemon, Place, place, running
from tests.web.clients import http_client


@dataclass
class Platform:
    """A client of the API with a token; `url` is the server's."""

    url: str
    http: httpx2.AsyncClient
    place: Place
    daemon: Daemon

    async def ask(self, method: str, path: str, **given: Any) -> httpx2.Response:
        return await self.http.request(method, f"{self.url}/api/{path}", **given)

    async def data(self, method: str, path: str, **given: Any) -> Any:
        response = await self.ask(method, path, **given)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    async def prepare(self, chat: str, **more: object) -> Any:
        given = {"chatSessionId": chat, **more}
        return (await self.data("POST", "sandbox/prepare", json=given))["sandboxSession"]

    async def made(self, session_id: str) -> Any:
        """The session once its sandbox is there."""
        while True:
            found = await self.data("GET", f"sandbox/{session_id}/status")
            if found["providerSandboxId"] or found["error"]:
                return found
            await anyio.sleep(0.02)

    async def with_token(self, user: str, scope: TokenScope, **headers: str) -> "Platform":
        secret = await token(self.place, user, scope)
        http = http_client(headers={"authorization": f"Bearer {secret}", **headers}, timeout=30)
        return Platform(self.url, http, self.place, self.daemon)


async def token(where: Place, user: str, scope: TokenScope) -> str:
    add = partial(TokenFile(where.data).add, user, scope=scope)
    return (await to_thread.run_sync(add))[1]


@asynccontextmanager
async def platform(
    tmp_path: Path,
    backend: str = "unsafe-local",
    more: Mapping[str, str] | None = None,
    limit_s: float = 50,
) -> AsyncGenerator[Platform]:
    where = place(tmp_path, backend, {"MCP_SANDBOX_CONTROL__ENABLED": "true", **(more or {})})
    async with serving(where, limit_s) as found:
        yield found


@asynccontextmanager
async def serving(where: Place, limit_s: float = 50) -> AsyncGenerator[Platform]:
    secret = await token(where, "ada", "control")
    async with running(where, "--http", "127.0.0.1:0", limit_s=limit_s) as daemon:
        await daemon.noted("MCP over HTTP at ")
        url = daemon.log.partition("MCP over HTTP at ")[2].split()[0].removesuffix("/mcp")
        headers = {"authorization": f"Bearer {secret}"}
        async with http_client(headers=headers, timeout=30) as http, anyio.create_task_group() as t:
            t.start_soon(daemon.keep_log)
            yield Platform(url, http, where, daemon)
            t.cancel_scope.cancel()
