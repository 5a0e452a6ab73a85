"""A chat's computer on every backend, through the door that the tools use."""

from collections.abc import AsyncGenerator

import pytest

from mcp_sandbox.app import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session

CHAT = ChatId("tester", "contract")


@pytest.fixture
async def manager(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as opened:
        yield opened


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    return await manager.session(CHAT)


@pytest.fixture
def isolated(backend_name: str) -> str:
    """The backend's name, in tests that would hurt the machine without isolation."""
    if backend_name == "unsafe-local":
        pytest.skip("would reach the machine's own processes and disks")
    return backend_name
