"""An agent in a new chat, where code is isolated."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.stumbles.agents import META, Agent, opened

__all__ = ["META", "Agent"]

# These ask for programs and limits of a place; the other answers are the server's own.
ABOUT_THE_PLACE = {"test_running", "test_skills", "test_people"}


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("docker") and item.path.stem not in ABOUT_THE_PLACE:
        item.add_marker(pytest.mark.whole)


# Deletes what earlier tests left in the chat's own places.
_EMPTY = "find /workspace /home/sandbox /tmp -mindepth 1 -delete 2>/dev/null; true"


@pytest.fixture(params=[DOCKER, BUBBLEWRAP], scope="module")
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def settings() -> dict[str, Any]:
    """Sections of the configuration that a test changes, by parametrizing this."""
    return {}


@pytest.fixture(scope="module")
async def lasting(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Agent]:
    """The agent of a module's tests: its sandbox starts once."""
    async with opened(backend_name, tmp_path_factory.mktemp("data"), {}) as made:
        yield made


@pytest.fixture
async def agent(
    lasting: Agent, backend_name: str, data_root: Path, settings: dict[str, Any]
) -> AsyncGenerator[Agent]:
    """An agent in an empty chat, a new one where settings differ."""
    if settings:
        async with opened(backend_name, data_root, settings) as made:
            yield made
    else:
        await lasting.told("exec", command=_EMPTY)
        yield lasting
