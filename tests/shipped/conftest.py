"""The shipped skills, in a chat's sandbox as an agent has them."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.types import CallToolResult

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId, ExecResult
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.server.scripted import one_chat

META = "mcp-sandbox/result"


@pytest.fixture(params=[DOCKER, BUBBLEWRAP])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Where code is isolated: the skills are written for these."""
    name: str = request.param
    return name


@pytest.fixture
def config(backend_name: str, data_root: Path) -> Config:
    return configured(backend_name, data_root)


@pytest.fixture
async def session(config: Config) -> AsyncGenerator[Session]:
    async with open_manager(config) as manager:
        yield await manager.session(ChatId("reader", "shipped"))


@pytest.fixture
async def client(session: Session) -> AsyncGenerator[Client]:
    """What calls the tools of that chat, as an agent does."""

    async def the_one(_chat: ChatId) -> Session:
        return session

    async with Client(build_server(make_session_finder(one_chat(session.chat), the_one))) as client:
        yield client


async def call(client: Client, said: dict[str, Any], **more: object) -> CallToolResult:
    """Make a call as a text writes it, but for what is given; it must succeed."""
    given = {name: value for name, value in {**said, **more}.items() if name != "tool"}
    result = await client.call_tool(said["tool"], given)
    assert not result.is_error, result
    return result


async def learn(session: Session, name: str) -> None:
    """Activate a skill; from then on its files are where its text says."""
    activation = await session.skills.activate(name)
    assert activation.path_in_sandbox == f"/opt/skills/{name}"


async def run(session: Session, command: str, code: int = 0) -> ExecResult:
    """Run what a text says, as it stands there; it must end with this exit code."""
    result = await session.exec(command, timeout_s=60)
    assert result.exit_code == code, result
    return result
