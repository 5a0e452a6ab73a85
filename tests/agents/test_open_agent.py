"""What cannot be opened as an agent is refused by its name, before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox import open_agent
from mcp_sandbox.config import AgentsConfig, Config, ConnectorConfig
from mcp_sandbox.errors import ImageMissing, InvalidArgument

SERVICES = {
    "near": ConnectorConfig(url="http://127.0.0.1:9"),
    "other": ConnectorConfig(url="http://127.0.0.1:9", protocol="openai"),
}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"command": "emacs"}, "unknown command type: emacs: choose one of claude, codex, direct"),
        ({"connector": "far"}, "no connector 'far'; there are near, other"),
        ({}, "no connector is named"),
        ({"connector": "near", "arguments": {"turns": 1}}, "turns: Extra .* There are: max_turns"),
        (
            {"connector": "near", "command": "codex"},
            "codex speaks the protocol openai, and connector near anthropic: name another",
        ),
        ({"connector": "near", "command": "cursor"}, "its key would have to be inside"),
    ],
)
async def test_what_is_not_there_is_named_with_what_is(
    given: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = Config(data_dir=tmp_path / "data", connectors=SERVICES)
    with pytest.raises(InvalidArgument, match=why):
        async with open_agent(config=config, **given):
            pass
    assert not (tmp_path / "data").exists()


async def test_the_configured_program_is_taken_where_none_is_named(tmp_path: Path) -> None:
    agents = AgentsConfig(command="emacs")
    config = Config(data_dir=tmp_path / "data", connectors=SERVICES, agents=agents)
    with pytest.raises(InvalidArgument, match="unknown command type: emacs"):
        async with open_agent(connector="near", config=config):
            pass


@pytest.mark.docker
async def test_an_image_that_has_the_program_is_taken_where_none_is_named(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-no-service")
    key.chmod(0o600)
    near = SERVICES["near"].model_copy(update={"key": f"file:{key}"})
    config = Config(data_dir=tmp_path, backend="docker", connectors={"near": near})
    async with open_agent(connector="near", config=config) as agent:
        try:
            taken = (await agent.session.info()).image
        except ImageMissing as exc:
            taken = str(exc)
    assert "mcp-sandbox/claude:latest" in str(taken)
