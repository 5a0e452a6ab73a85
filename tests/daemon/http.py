"""A real daemon that serves HTTP too, and what its users need to reach it."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from mcp import Client

from mcp_sandbox.web.tokens import TokenFile, TokenInfo
from tests.daemon.running import Daemon, Place, running
from tests.web.clients import connected


@dataclass(frozen=True)
class Served:
    """Where the daemon is, and the tokens of its users."""

    daemon: Daemon
    url: str
    place: Place

    async def token(self, user: str) -> tuple[TokenInfo, str]:
        return await to_thread.run_sync(TokenFile(self.place.data).add, user)

    async def revoke(self, token: TokenInfo) -> None:
        await to_thread.run_sync(TokenFile(self.place.data).revoke, token.id)

    @asynccontextmanager
    async def client(
        self, user: str, chat: str | None = "work", mode: Any = "auto"
    ) -> AsyncGenerator[Client]:
        """The SDK's client with a token of this user."""
        _, secret = await self.token(user)
        headers = {"Authorization": f"Bearer {secret}"}
        if chat is not None:
            headers["Mcp-Sandbox-Chat"] = chat
        async with connected(self.url, mode, headers) as client:
            yield client


@asynccontextmanager
async def serving(place: Place, *options: str, limit_s: float = 50) -> AsyncGenerator[Served]:
    """A daemon on a free port of loopback."""
    async with running(place, "--http", "127.0.0.1:0", *options, limit_s=limit_s) as daemon:
        await daemon.noted("/mcp\n")
        found = re.search(r"MCP over HTTP at (\S+)", daemon.log)
        assert found is not None, daemon.log
        yield Served(daemon, found[1], place)
