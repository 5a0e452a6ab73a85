"""Claude asks its user for us: what it does where there is none, and with its own hook for that."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.running import Place
from tests.e2e import npm
from tests.e2e.claude import Claude, consent
from tests.e2e.doors import placed, served
from tests.e2e.messages_api import Script
from tests.e2e.test_network_access import FETCH, SHOPS
from tests.world import World

pytestmark = [
    pytest.mark.claude,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.bubblewrap,
]
ROOT = Path(__file__).parents[2]
PUSH = "git push https://git.example.org/acme/widgets main 2> /dev/null; printf ran"
CALL = ("mcp__sandbox__exec", {"command": PUSH})
SAID = {
    None: "there is no answer yet",
    "accept": "ran",
    "decline": "the user has said no",
}


@pytest.mark.parametrize("action", SAID)
async def test_claude_passes_the_question_on_and_the_answer_back(
    action: str | None, npm_cache: Path, tmp_path: Path
) -> None:
    start = ["-m", "mcp_sandbox", "stdio", "--backend", "bubblewrap"]
    arguments = [*start, "--data", str(tmp_path / "data")]
    env = {"PYTHONPATH": str(ROOT), "MCP_SANDBOX_NETWORK": "open"}
    project = made(tmp_path, {"command": sys.executable, "args": arguments, "env": env})
    script = Script((CALL,), last_words="Done.")
    programs = npm.installed("claude", npm_cache)
    await Claude(programs, project, tmp_path / "home", {}).follow(script, *answering(action))
    assert SAID[action] in script.heard[0]


async def test_claude_gets_hosts_that_its_user_allows(
    world: World, npm_cache: Path, tmp_path: Path
) -> None:
    egress = {"allow": ["plain.example.com"]}
    where: Place = placed(world, tmp_path, "bubblewrap", {"egress": egress, "secrets": {}})
    program, *arguments = where.command("connect", "--chat", "claude")
    server = {"command": program, "args": arguments, "env": where.environment()}
    project = made(tmp_path, server)
    wanted = {"hosts": SHOPS, "reason": "to install tiny"}
    fetch = ("mcp__sandbox__exec", {"command": f"{FETCH} && ls *.whl"})
    script = Script(
        (fetch, ("mcp__sandbox__network_access", wanted), fetch), last_words="It is there."
    )
    programs = npm.installed("claude", npm_cache)
    async with served(world, where, "bubblewrap"):
        claude = Claude(programs, project, tmp_path / "home", {})
        await claude.follow(script, *answering("accept"))
    assert "network_access asks the user for it" in script.heard[0]
    assert script.heard[1].startswith("the user allows pypi.org")
    assert "tiny-1.0-py3-none-any.whl" in script.heard[2]


def made(folder: Path, server: dict[str, Any]) -> Path:
    """A project with this server, and the consent to it."""
    project = folder / "project"
    project.mkdir()
    (folder / "home").mkdir(exist_ok=True)
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"sandbox": server}}))
    consent(project)
    return project


def answering(action: str | None) -> tuple[str, ...]:
    """Options by which a program answers in the user's place, if any does."""
    if action is None:
        return ()
    output = {"hookEventName": "Elicitation", "action": action, "content": {}}
    said = json.dumps({"hookSpecificOutput": output})
    hook = {"hooks": [{"type": "command", "command": f"echo '{said}'"}]}
    return ("--settings", json.dumps({"hooks": {"Elicitation": [hook]}}))
