"""The Claude command line at work inside, without network, and its key outside."""

import json
import re
import shutil
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcp_sandbox.agents.events import (
    Completion,
    Event,
    Notice,
    Progress,
    Started,
    Text,
    ToolCall,
    ToolResult,
)
from mcp_sandbox.agents.run import Agent
from mcp_sandbox.app.agents import open_agent
from mcp_sandbox.config import Config, ConnectorConfig
from mcp_sandbox.errors import OperatorError
from tests.daemon.running import Done, command, place
from tests.e2e import npm, openai_api
from tests.e2e.agents import KEY, working
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, KUBERNETES
from tests.e2e.messages_api import Fault, Script, serving

CODE = "print(6 * 7, open('note.txt').read())"
CALLS = (
    ("Write", {"file_path": "/workspace/note.txt", "content": "kept"}),
    ("Bash", {"command": f'python3 -c "{CODE}"; cat missing'}),
)
RUNSC = pytest.param("docker-runsc", marks=(pytest.mark.docker, pytest.mark.runsc))
everywhere = pytest.mark.parametrize(
    "backend_name", [BUBBLEWRAP, DOCKER, RUNSC, KUBERNETES], indirect=True
)
pytestmark = [pytest.mark.claude, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def script() -> Script:
    return Script(CALLS, last_words="All done.")


@pytest.fixture
def config(config: Config, npm_cache: Path, tmp_path: Path, script: Script) -> Generator[Config]:
    with serving(script) as address:
        used = working(config, "claude", npm_cache, tmp_path, ConnectorConfig(url=address))
        yield used.model_copy(update={"env": {"CLAUDE_CODE_MAX_RETRIES": "1"}})


@asynccontextmanager
async def opened(config: Config, **given: Any) -> AsyncGenerator[Agent]:
    async with open_agent(chat="agents", config=config, **given) as agent:
        yield agent


async def answers(agent: Agent, request: str, **how: Any) -> list[Event]:
    """What happens, but for how far it is."""
    events = agent.stream([{"role": "user", "content": request}], **how)
    return [event async for event in events if not isinstance(event, Progress)]


@everywhere
async def test_claude_works_inside_and_its_key_stays_outside(
    config: Config, script: Script
) -> None:
    async with opened(config) as agent:
        events = await answers(agent, "Make a note.")
        assert [type(event) for event in events] == [
            *(Started, ToolCall, ToolResult, ToolCall, ToolResult, Text, Completion)
        ]
        result, last = events[4], events[-1]
        assert isinstance(result, ToolResult)
        assert result.is_error
        assert "42 kept" in result.content
        assert isinstance(last, Completion)
        assert (last.content, last.is_error, last.turns) == ("All done.", False, 3)
        assert await agent.read_file("note.txt") == b"kept"
        seen = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; env"
        files = "grep -rslF sk-marked / --exclude-dir={proc,sys,usr,agents}"
        inside = await agent.session.exec(f"{seen}; {files}")
        assert "sk-marked" not in inside.stdout.replace(files, "")
        assert "/tmp/mcp-sandbox-run" not in (await agent.exec(["find", "/tmp"]))
    keys = [value for head, _ in script.asked for name, value in head.items() if "key" in name]
    assert set(keys) == {KEY}
    assert len(keys) == len(script.asked)
    assert "WebSearch" not in script.told


@everywhere
async def test_a_conversation_goes_on_in_a_new_sandbox(config: Config, script: Script) -> None:
    async with opened(config) as agent:
        await answers(agent, "The word is heron.")
    script.told = ""
    async with opened(config) as agent:
        second = await answers(agent, "Which word?", resume=True)
    assert isinstance(second[0], Started)
    assert isinstance(second[-1], Completion)
    assert not second[-1].is_error
    assert "The word is heron." in script.told
    assert "Which word?" in script.told


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_a_model_service_that_fails_is_told_with_its_status(
    config: Config, script: Script
) -> None:
    script.faults += [Fault(529)] * 10
    async with opened(config) as agent:
        events = await answers(agent, "go")
    last = events[-1]
    assert isinstance(last, Completion)
    assert last.is_error
    assert "529" in last.reason
    assert any(isinstance(event, Notice) and "529" in event.text for event in events)
    assert KEY not in repr(events)


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_a_run_that_is_cut_off_says_what_its_model_has_counted(config: Config) -> None:
    async with opened(config) as agent:
        async for event in agent.stream([{"role": "user", "content": "go"}]):
            if isinstance(event, ToolResult):
                await agent.session.exec("pkill -9 -x claude")
        assert isinstance(event, Completion)
        assert event.reason.startswith("killed: ")
        assert event.usage.total >= 2
        again = (await answers(agent, "go"))[-1]
        assert isinstance(again, Completion)
        assert again.content == "All done."


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_the_model_and_the_turns_that_were_asked_for_are_used(
    config: Config, script: Script
) -> None:
    async with opened(config, connector="scripted/v3", arguments={"max_turns": 1.0}) as agent:
        last = (await answers(agent, "go"))[-1]
    assert isinstance(last, Completion)
    assert last.reason.startswith("max_turns: ")
    assert '"model": "v3"' in script.told


@everywhere
async def test_a_service_of_the_other_protocol_is_asked_by_way_of_the_router(
    config: Config, npm_cache: Path
) -> None:
    router = openai_api.Script(CALLS, "All done.")
    package = npm.installed("ccr", npm_cache).parent / "@musistudio" / "claude-code-router"
    if programs := config.agents.programs:
        shutil.copytree(package / "dist", programs / "ccr", dirs_exist_ok=True)
        with suppress(FileExistsError):
            (programs / "bin" / "ccr").symlink_to("../ccr/cli.js")
    with openai_api.serving(router) as address:
        service = config.connectors["scripted"].model_copy(
            update={"url": address, "protocol": "openai", "model": "m1"}
        )
        other = config.model_copy(update={"connectors": {"other": service}})
        async with opened(other) as agent:
            events = await answers(agent, "Make a note.")
            left = await agent.session.exec("pgrep -f 'ccr|cli.js'; ls -d /tmp/mcp-sandbox-run-*")
    assert [type(event) for event in events] == [
        *(Started, ToolCall, ToolResult, ToolCall, ToolResult, Text, Completion)
    ]
    last = events[-1]
    assert isinstance(last, Completion)
    assert (last.content, last.reason, last.usage.total) == ("All done.", "", 24)
    assert left.stdout == ""
    assert {head["authorization"] for head, _ in router.asked} == {f"Bearer {KEY}"}
    assert {body["model"] for _, body in router.asked} == {"m1"}


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_a_key_that_is_not_there_is_an_error_before_anything_runs(config: Config) -> None:
    nowhere = {"scripted": ConnectorConfig(url="http://127.0.0.1:9", key="")}
    with pytest.raises(OperatorError, match=r"connectors\.scripted"):
        async with opened(config.model_copy(update={"connectors": nowhere})):
            pass
    assert not config.data_dir.exists()


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_people_hand_a_request_to_an_agent_on_the_command_line(
    config: Config, tmp_path: Path
) -> None:
    service = config.connectors["scripted"]
    file = tmp_path / "agents.yaml"
    written = {
        "data_dir": str(config.data_dir),
        "backend": "bubblewrap",
        "agents": {"programs": str(config.agents.programs)},
        "connectors": {"scripted": {"url": service.url, "key": service.key}},
    }
    file.write_text(yaml.safe_dump(written))
    where = place(tmp_path, more={"MCP_SANDBOX_CONFIG": str(file)})

    async def people(job: str, *given: str) -> Done:
        return await command(where, f"agent {job}", *given)

    code, said, told = await people("run", "Make a note.")
    assert (code, said) == (0, "All done.\n"), told
    assert "[Write " in told
    code, said, told = await people("run", "Again.", "--json")
    assert [json.loads(line)["type"] for line in said.splitlines()][-1] == "Completion", told
    code, said, told = await people("run", "Never.", "--timeout", "100ms")
    assert code == 124, told
    code, said, told = await people("run", "x", "-a", "nobody")
    assert (code, said) == (1, "")
    assert "there is no assistant 'nobody'" in told
    code, said, told = await command(where, "agent check", asks=False)
    assert code == 0, told
    assert (await command(where, "shutdown")).code == 0
    assert re.search(r"program +2\.1\..*\nmodel +answers \d+\ntools +none", said)
