"""An assistant at work inside: its instructions, tools of the host, skill, and hooks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcp_sandbox import open_agent
from mcp_sandbox.agents.events import Completion, HostTool, Progress, Text, ToolCall, ToolResult
from mcp_sandbox.config import Config
from mcp_sandbox.errors import NotPermitted
from tests.e2e.attacks import BUBBLEWRAP
from tests.e2e.messages_api import Script
from tests.e2e.test_agents import config, everywhere
from tests.server import host_tools

__all__ = ["config"]
pytestmark = [pytest.mark.claude, pytest.mark.slow, pytest.mark.timeout(300)]
SKILL = "---\nname: adding\ndescription: How to add.\n---\nCarry the one."
HOOKS = """
async def create(ctx, messages, options):
    assert (await ctx.sandbox.exec(["node", "--version"])).startswith("v")
    if "forbidden" in str(messages):
        raise RuntimeError("this is not to be done")
    await ctx.progress("looking around")
    await ctx.sandbox.write_file("tmp/asked.json", '{"asked": 1}')
    return messages

async def next(ctx, payload, options):
    ctx.memory["runs"] = ctx.memory.get("runs", 0) + 1
    made = __import__("json").loads(await ctx.sandbox.read_file("result.json"))
    assert made["sum"] == "5", made
    assert "result.json" in [each.name for each in await ctx.sandbox.list_dir(".")]
    for command in (["git", "init", "-q"], ["git", "add", "result.json"],
                    ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "Add"],
                    ["rm", "-rf", "tmp/"]):
        await ctx.sandbox.exec(command)
    raise RuntimeError(f"run {ctx.memory['runs']} of this chat")
"""


@pytest.fixture
def script() -> Script:
    return Script(
        [
            ("mcp__host__sums__add", {"a": 2, "b": 3}),
            ("Skill", {"skill": "adding"}),
            ("Write", _result),
        ],
        last_words="Added.",
    )


def _result(heard: Any) -> dict[str, str]:
    return {"file_path": "/workspace/result.json", "content": json.dumps({"sum": heard[0]})}


@pytest.fixture
def assistants(tmp_path: Path) -> Path:
    folder = tmp_path / "assistants" / "adder"
    files = {
        "assistant.yaml": {
            "sandbox": {
                "timeout": "100s",
                "max_memory": "1g",
                "arguments": {
                    "max_turns": 20.0,
                    "permission_mode": "acceptEdits",
                    "allowed_tools": ["Skill"],
                },
            },
            "mcp": {"servers": [{"server_id": "sums", "tools": ["add"]}]},
        },
        "prompts.yml": [{"role": "system", "content": "You add numbers, and nothing else."}],
        "mcps/sums.yaml": {"command": [sys.executable, host_tools.__file__]},
        "skills/adding/SKILL.md": SKILL,
        "hooks.py": HOOKS,
    }
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return folder.parent


@pytest.fixture
def served(config: Config, assistants: Path, tmp_path: Path) -> Config:
    update = {"folders": (assistants,), "usage_log": tmp_path / "usage.jsonl"}
    return config.model_copy(update={"agents": config.agents.model_copy(update=update)})


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@everywhere
async def test_an_assistant_works_as_its_folder_says(
    served: Config, script: Script, tmp_path: Path
) -> None:
    def shout(text: str) -> str:
        """In capitals."""
        return text.upper()

    async with open_agent("adder", "adding", tools=[shout], config=served) as agent:
        events = [event async for event in agent.stream(asked("Add 2 and 3."))]
        said = await agent.exec(["git", "log", "--format=%s"])
        assert said == "Add\n"
        assert "tmp" not in [each.name for each in await agent.list_dir(".")]
        assert (await agent.session.info()).limits["memory"].startswith("1024 MiB")
    calls = [event.name for event in events if isinstance(event, ToolCall)]
    assert calls == ["mcp__host__sums__add", "Skill", "Write"]
    results = [event for event in events if isinstance(event, ToolResult)]
    assert [each.is_error for each in results] == [False] * 3, results
    assert results[0].content == "5"
    assert [each.name for each in events if isinstance(each, HostTool)] == ["sums__add"]
    assert any(isinstance(each, Progress) and each.text == "looking around" for each in events)
    assert any(isinstance(each, Text) and "Added." in each.text for each in events)
    last = events[-1]
    assert isinstance(last, Completion)
    assert (last.content, last.is_error) == ("Added.", False)
    assert "the hook next failed: run 1 of this chat" in repr(events[-2])
    assert "You add numbers, and nothing else." in script.told
    assert "mcp__host__shout" in script.told
    (line,) = (tmp_path / "usage.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert (noted["assistant"], noted["connector"], noted["chat"]) == (
        "adder",
        "scripted",
        "adding",
    )
    assert noted["usage"]["total"] == last.usage.total > 0


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_what_a_hook_refuses_starts_nothing_and_leaves_no_sandbox(
    served: Config, script: Script
) -> None:
    async with open_agent("adder", "adding", config=served) as agent:
        with pytest.raises(NotPermitted, match="this is not to be done"):
            await agent.execute(asked("forbidden"))
        assert not agent.session.has_sandbox
    assert not script.asked
