"""The Codex command line at work inside, without network: another agent is another executor."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox import open_agent
from mcp_sandbox.agents.events import (
    Completion,
    Event,
    HostTool,
    Notice,
    Progress,
    Started,
    Text,
    ToolCall,
    ToolResult,
    Usage,
)
from mcp_sandbox.config import Config, ConnectorConfig
from tests.agents.test_messages import said, text
from tests.e2e.agents import KEY, working
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.openai_api import Script, serving

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4"
    "2mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DOT = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
pytestmark = [
    pytest.mark.codex,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.parametrize("backend_name", [BUBBLEWRAP, DOCKER], indirect=True),
]


@pytest.fixture
def script() -> Script:
    note = {"cmd": "echo kept > note.txt; cat note.txt; cat missing"}
    return Script([("exec_command", note), ("mcp__host.shout", {"text": "hello"})], "All done.")


@pytest.fixture
def config(config: Config, npm_cache: Path, tmp_path: Path, script: Script) -> Generator[Config]:
    with serving(script) as address:
        service = ConnectorConfig(url=address, protocol="openai", model="m1")
        yield working(config, "codex", npm_cache, tmp_path, service)


def shout(text: str) -> str:
    """In capitals."""
    return text.upper()


async def answers(config: Config, messages: list[dict[str, Any]], **how: Any) -> list[Event]:
    """What happens, but for how far it is and what the program remarks."""
    async with open_agent(chat="codex", config=config, tools=[shout]) as agent:
        events = [event async for event in agent.stream(messages, **how)]
        assert "/tmp/mcp-sandbox-run" not in (await agent.exec(["find", "/tmp"]))
    return [event for event in events if not isinstance(event, Progress | Notice)]


async def test_codex_works_inside_and_its_key_stays_outside(config: Config, script: Script) -> None:
    messages = [
        said("system", "You make notes."),
        said("user", "Hello."),
        said("assistant", "Yes?"),
        said("user", [text("Make a note."), DOT]),
    ]
    events = await answers(config, messages)
    # The host may tell of its tool before the program does.
    assert any(isinstance(event, HostTool) for event in events)
    events = [event for event in events if not isinstance(event, HostTool)]
    assert [type(event) for event in events] == [
        *(Started, ToolCall, ToolResult, ToolCall, ToolResult, Text, Completion)
    ]
    _, call, result, shouted, heard, _, last = events
    assert isinstance(call, ToolCall)
    assert "note.txt" in call.arguments["command"]
    assert isinstance(result, ToolResult)
    assert result.is_error
    assert result.content.startswith("kept")
    assert shouted == ToolCall(shouted.id, "shout", {"text": "hello"})  # type: ignore[union-attr]
    assert heard == ToolResult(heard.id, "HELLO")  # type: ignore[union-attr]
    assert isinstance(last, Completion)
    assert (last.content, last.reason, last.usage) == ("All done.", "", Usage(15, 9, 24))
    assert {head["authorization"] for head, _ in script.asked} == {f"Bearer {KEY}"}
    given = str(script.asked[0][1])
    assert all(each in given for each in ("You make notes.", "[assistant]: Yes?", "data:image/png"))


async def test_a_conversation_goes_on_in_a_new_sandbox(config: Config, script: Script) -> None:
    script.calls = ()
    await answers(config, [said("user", "The word is heron.")])
    script.asked.clear()
    *_, last = await answers(config, [said("user", "Which word?")], resume=True)
    assert isinstance(last, Completion)
    assert last.usage == Usage(5, 3, 8)
    given = str(script.asked[0][1])
    assert "The word is heron." in given
    assert "Which word?" in given
