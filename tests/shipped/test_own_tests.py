"""Each shipped skill declares how it is tried out, and passes."""

import pytest

from mcp_sandbox.app.skill_tests import try_out
from mcp_sandbox.config import Config
from tests.e2e.attacks import on_docker_if_whole
from tests.shipped.texts import NAMES, SHIPPED


@on_docker_if_whole
@pytest.mark.parametrize("name", NAMES)
async def test_it_passes_the_tests_that_it_comes_with(config: Config, name: str) -> None:
    trials = await try_out(SHIPPED / name, config)
    assert [(each.example.name, each.why) for each in trials if each.verdict != "passed"] == []
    assert [trial.example.kind for trial in trials].count("test") == 1
