"""A chat's tools through a real MCP client, where code is isolated."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client

from mcp_sandbox.app.chats import make_server, open_manager, open_skills
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import bind_connection
from tests.conftest import configured
from tests.server.scripted import text_of

META = "mcp-sandbox/result"


class Agent:
    """Calls tools by name, as an agent does."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> Any:
        """The whole result, also of a call that is refused."""
        return await self.client.call_tool(tool, arguments)

    async def told(self, tool: str, **arguments: Any) -> str:
        """The text of a result that is no error."""
        result = await self.call(tool, **arguments)
        assert not result.is_error, text_of(result)
        return text_of(result)

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The text of a result that is an error."""
        result = await self.call(tool, **arguments)
        assert result.is_error, text_of(result)
        return text_of(result)

    async def meta(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """What a result's `_meta` says of it."""
        meta: dict[str, Any] = (await self.call(tool, **arguments)).meta[META]
        return meta


@asynccontextmanager
async def opened(
    backend: str, data_root: Path, settings: Mapping[str, Any]
) -> AsyncGenerator[Agent]:
    """An agent in a new chat; `settings` are sections of the configuration that differ."""
    given = configured(backend, data_root)
    config = type(given).model_validate(given.model_dump() | dict(settings))
    chat = ChatId("tester", "stumbles")
    skills = open_skills(config)
    async with open_manager(config, skills=skills) as manager:
        server = make_server(config, skills, manager.session)
        with bind_connection(chat):
            async with Client(server) as client:
                yield Agent(client)
