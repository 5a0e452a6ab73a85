"""An agent in a new chat, where code is isolated."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.stumbles.agents import META, Agent, opened

__all__ = ["META", "Agent"]


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
    async with opened(backend_name, data_root, settings) as made:
        yield made
