"""A chat's tools through a real MCP client, where code is isolated."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from mcp_sandbox.app import open_manager
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import one_chat, sessions_by
from mcp_sandbox.server.server import build_server
from tests.conftest import configured
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
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


@pytest.fixture(params=[DOCKER, BUBBLEWRAP])
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def settings() -> dict[str, Any]:
    """Sections of the configuration that a test changes, by parametrizing this."""
    return {}


@pytest.fixture
async def agent(
    backend_name: str, data_root: Path, settings: dict[str, Any]
) -> AsyncGenerator[Agent]:
    """An agent in a new chat."""
    given = configured(backend_name, data_root)
    config = type(given).model_validate(given.model_dump() | settings)
    chat = one_chat(ChatId("tester", "stumbles"))
    async with open_manager(config) as manager:
        server = build_server(sessions_by(chat, manager.session))
        async with Client(server) as client:
            yield Agent(client)
