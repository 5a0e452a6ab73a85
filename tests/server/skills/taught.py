"""A server that teaches the skills of a folder, with an MCP client at it."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp import Client

from mcp_sandbox.app.chats import make_server, open_manager, open_skills
from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import bind_connection
from mcp_sandbox.server.server import SandboxServer
from tests.conftest import configured
from tests.server.scripted import text_of

CHAT = ChatId("tester", "taught")


def write_skill(folder: Path, name: str, *, body: bytes = b"Do it well.\n", **fields: str) -> Path:
    """Write a skill into a folder of skills; `fields` are further ones of the front matter."""
    said = {"name": name, "description": f"Helps with {name}.", **fields}
    lines = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in said.items())
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "SKILL.md").write_bytes(f"---\n{lines}---\n".encode() + body)
    return place


class Taught:
    """Calls the tools of a chat."""

    def __init__(self, client: Client, server: SandboxServer) -> None:
        self.client = client
        self._server = server

    @asynccontextmanager
    async def another(self, **more: Any) -> AsyncGenerator["Taught"]:
        """A further client of the same chat."""
        async with Client(self._server, **more) as client:
            yield Taught(client, self._server)

    @property
    def instructions(self) -> str:
        return self.client.instructions or ""

    @asynccontextmanager
    async def in_chat(self, chat: str) -> AsyncGenerator["Taught"]:
        """A client of another chat of the user."""
        with bind_connection(ChatId(CHAT.user, chat)):
            async with self.another() as taught:
                yield taught

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self.client.list_tools()).tools]

    async def list(self, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool("skills_list", arguments)
        assert not result.is_error, text_of(result)
        found: dict[str, Any] = result.structured_content or {}
        return found

    async def activate(self, name: str, **arguments: Any) -> str:
        result = await self.client.call_tool("skill_activate", {"name": name, **arguments})
        assert not result.is_error, text_of(result)
        return text_of(result)

    async def refused(self, tool: str, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        return text_of(result)

    async def meta(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        result = await self.client.call_tool("skill_activate", {"name": name, **arguments})
        found: Mapping[str, Any] = (result.meta or {})["mcp-sandbox/result"]
        return found


@asynccontextmanager
async def taught(
    data_root: Path,
    folder: Path,
    *,
    mode: Any = "auto",
    **settings: Any,
) -> AsyncGenerator[Taught]:
    """A client of a server that offers the skills in `folder` alone."""
    given = {"shipped": False, "folders": (folder,), **settings}
    config = configured(data_root.name, data_root).model_copy(
        update={"skills": SkillsConfig(**given)}
    )
    skills = open_skills(config)
    with anyio.fail_after(40):
        async with open_manager(config, skills=skills) as manager:
            server = make_server(config, skills, manager.session)
            with bind_connection(CHAT):
                async with Client(server, mode=mode) as client:
                    yield Taught(client, server)
