"""What cannot be opened as an agent is refused by its name, before anything is started."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox import open_agent, open_session
from mcp_sandbox.agents.assistants import read_assistant
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.app.agents import read_spec
from mcp_sandbox.config import AgentsConfig, Config, ConnectorConfig, KubernetesConfig
from mcp_sandbox.errors import ConfigError, ImageMissing, InvalidArgument
from tests.conftest import configured

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


def test_an_image_that_is_configured_is_that_of_agents_too(tmp_path: Path) -> None:
    own = KubernetesConfig(image="registry.example/claude:1")
    usual = read_assistant([], "", "local")
    assert read_spec(usual, Config(data_dir=tmp_path)).image == Claude.image
    assert read_spec(usual, Config(data_dir=tmp_path, backend="kubernetes")).image == Claude.image
    named = Config(data_dir=tmp_path, backend="kubernetes", kubernetes=own)
    assert read_spec(usual, named).image == ""


async def test_the_configured_program_is_taken_where_none_is_named(tmp_path: Path) -> None:
    agents = AgentsConfig(command="emacs")
    config = Config(data_dir=tmp_path / "data", connectors=SERVICES, agents=agents)
    with pytest.raises(InvalidArgument, match="unknown command type: emacs"):
        async with open_agent(connector="near", config=config):
            pass


@pytest.mark.bubblewrap
async def test_an_image_is_refused_by_a_place_that_has_none_unless_it_is_that_of_a_program(
    tmp_path: Path,
) -> None:
    key, written = tmp_path / "key", tmp_path / "assistants" / "coder" / "assistant.yaml"
    key.write_text("sk-of-no-service")
    key.chmod(0o600)
    written.parent.mkdir(parents=True)
    config = Config(
        data_dir=tmp_path / "data",
        backend="bubblewrap",
        agents=AgentsConfig(folders=(tmp_path / "assistants",)),
        connectors={"near": SERVICES["near"].model_copy(update={"key": f"file:{key}"})},
    )
    written.write_text("sandbox: {image: my-image}")
    with pytest.raises(ConfigError, match="bubblewrap has no images, and assistant coder"):
        async with open_agent("coder", config=config):
            pass
    written.write_text("sandbox: {max_memory: 512m}")
    async with open_agent("coder", config=config) as agent:
        assert (await agent.session.exec("echo here")).stdout == "here\n"


@pytest.mark.docker
async def test_the_image_of_an_assistant_is_that_of_its_chat_for_every_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, written = tmp_path / "key", tmp_path / "assistants" / "coder" / "assistant.yaml"
    key.write_text("sk-of-no-service")
    key.chmod(0o600)
    written.parent.mkdir(parents=True)
    tagged, usual = "mcp-sandbox/of-a-test:latest", configured("docker", tmp_path).docker
    written.write_text(f"sandbox: {{image: {tagged!r}, max_memory: 512m}}")
    config = Config(
        data_dir=tmp_path / "data",
        backend="docker",
        agents=AgentsConfig(folders=(tmp_path / "assistants",)),
        connectors={"near": SERVICES["near"].model_copy(update={"key": f"file:{key}"})},
    )
    # Where no image is configured it is one that has the program; what is not there is not kept.
    # A machine may have the real one.
    monkeypatch.setattr(Claude, "image", "mcp-sandbox/claude:of-a-test")
    for assistant, image in (("", "mcp-sandbox/claude:of"), ("coder", "mcp-sandbox/of-a-test")):
        with pytest.raises(ImageMissing, match=f"{image}.* mcp-sandbox images build"):
            async with open_agent(assistant, config=config):
                pass
    config = config.model_copy(update={"docker": usual})
    async with open_session(config=config) as session:
        assert (await session.info()).image == usual.image
    await anyio.run_process(["docker", "tag", usual.image, tagged])
    try:
        async with open_agent("coder", config=config) as agent:
            assert (await agent.session.info()).image == tagged
            async with open_session(config=config) as session:
                # Nor can the agent inside get rid of it.
                await session.reset(keep_files=False)
                found = await session.info()
                assert (found.image, found.limits["memory"][:8]) == (tagged, "512 MiB,")
    finally:
        await anyio.run_process(["docker", "rmi", "--no-prune", tagged])
