"""The operator's programs for agents: in every sandbox, before all others, read-only."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import find_programs, open_manager
from mcp_sandbox.config import AgentsConfig, Config
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
CHAT = ChatId("tester", "programs")


def with_programs(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"agents": AgentsConfig(programs=folder)})


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    agent = tmp_path / "programs" / "bin" / "agent"
    agent.parent.mkdir(parents=True)
    agent.write_text("#!/bin/sh\necho the agent of the operator\n")
    # Nothing but the mount keeps the sandbox's user from writing there.
    for path in (agent, agent.parent):
        path.chmod(0o777)
    return tmp_path / "programs"


async def test_programs_for_agents_come_first_and_cannot_be_changed(
    config: Config, programs: Path
) -> None:
    async with open_manager(with_programs(config, programs)) as manager:
        session = await manager.session(CHAT)
        own = "mkdir -p ~/.local/bin; echo echo of the chat >~/.local/bin/agent; chmod +x $_"
        assert (await session.exec(f"{own}; agent")).stdout == "the agent of the operator\n"
        changed = await session.exec("rm -rf /opt/agents/bin; echo other >/opt/agents/bin/agent")
        assert changed.exit_code != 0
        assert changed.stderr.count("Read-only file system") == 2
    assert "operator" in (programs / "bin" / "agent").read_text()


async def test_programs_come_before_a_path_of_the_operators_own(
    config: Config, programs: Path
) -> None:
    own = with_programs(config, programs).model_copy(update={"env": {"PATH": "/usr/bin:/bin"}})
    async with open_manager(own) as manager:
        said = await (await manager.session(CHAT)).exec("echo $PATH; agent")
    assert said.stdout == "/opt/agents/bin:/usr/bin:/bin\nthe agent of the operator\n"


async def test_without_programs_there_is_no_place_for_them(config: Config) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        said = await session.exec("echo $PATH; ls /opt/agents")
    assert "/opt/agents" not in said.stdout
    assert said.exit_code != 0


@pytest.mark.parametrize("folder", ["/", "/usr", "/etc", "{data}", "{data}/sandbox", "{data}/.."])
def test_programs_from_where_no_sandbox_may_look_are_refused(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sandbox").mkdir(parents=True)
    config = with_programs(Config(data_dir=data), Path(folder.format(data=data)))
    with pytest.raises(ConfigError, match=r"agents\.programs: the folder .* is not shown"):
        find_programs(config)


def test_programs_that_are_not_there_are_told_with_their_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agents\.programs: the folder .*absent cannot be used"):
        find_programs(with_programs(Config(data_dir=tmp_path), tmp_path / "absent"))


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_lines_of_the_docs_bring_the_agent(config: Config, tmp_path: Path) -> None:
    (lines,) = re.findall(r"^```sh\n(npm install [^`]*)```", PAGE.read_text(), re.MULTILINE)
    npm = shutil.which("npm")
    assert npm
    await to_thread.run_sync(
        lambda: subprocess.run(
            ["bash", "-e", "-c", lines.replace("~/agents", str(tmp_path / "agents"))],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    )
    async with open_manager(with_programs(config, tmp_path / "agents")) as manager:
        session = await manager.session(CHAT)
        said = await session.exec("command -v claude ccr; claude --version; ccr version")
    assert said.stdout.startswith("/opt/agents/bin/claude\n/opt/agents/bin/ccr\n2.1.")
    assert said.exit_code == 0, said.stderr
