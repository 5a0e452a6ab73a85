"""Clients that find the server by the file that `init` wrote, and reach it through the relay."""

import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import Place, control
from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.messages_api import Script, serving
from tests.e2e.test_claude import CALLS, environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[BUBBLEWRAP, DOCKER])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Place]:
    """A home with a project and settings; the daemon that the relay starts is asked to end.

    The settings are in a file: the Inspector gives its servers hardly any variables.
    """
    state = tmp_path / ".local" / "state" / "mcp-sandbox"
    found = Place(tmp_path, state / "mcp.sock", tmp_path / "data", request.param)
    (tmp_path / "project" / ".claude").mkdir(parents=True)
    settings = tmp_path / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"backend: {found.backend}\ndata_dir: {found.data}\n")
    yield found
    with anyio.fail_after(30):
        await control(found, "shutdown")
        while found.socket.exists():
            await anyio.sleep(0.02)


def variables(where: Place) -> dict[str, str]:
    known = {name: os.environ[name] for name in ("PATH", "DOCKER_HOST") if name in os.environ}
    return {**known, "HOME": str(where.home)}


async def init(where: Place, client: str) -> None:
    command = [sys.executable, "-m", "mcp_sandbox", "init", client, "--yes", "--no-check"]
    env = {**variables(where), "PYTHONPATH": str(ROOT)}
    await anyio.run_process(command, cwd=where.home / "project", env=env)


@pytest.mark.inspector
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_the_inspector_finds_the_server_by_its_name(
    era: str, where: Place, npm_cache: Path
) -> None:
    await init(where, "inspector")
    programs = npm.installed("inspector", npm_cache)
    command = [str(programs / "node"), str(programs / "mcp-inspector"), "--cli", "--format", "json"]
    command += ["-q", "--protocol-era", era, "--server", "sandbox", "--method", "tools/call"]
    command += ["--tool-name", "run_code", "--tool-args-json", json.dumps({"code": "print(6 * 7)"})]
    with anyio.fail_after(90):
        done = await anyio.run_process(command, env=variables(where), check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["result"]["content"][0]["text"] == "42\n"


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_claude_finds_the_server_and_each_conversation_has_its_own_files(
    where: Place, npm_cache: Path
) -> None:
    await init(where, "claude")
    project = where.home / "project"
    consent = json.dumps({"enabledMcpjsonServers": ["sandbox"]})
    (project / ".claude" / "settings.local.json").write_text(consent)
    first = Script(CALLS, last_words="The note says: kept.")
    other = Script((("mcp__sandbox__exec", {"command": "ls; echo end"}),), last_words="Nothing.")
    programs = npm.installed("claude", npm_cache)
    for script in (first, other):
        with serving(script) as address, anyio.fail_after(110):
            env = environment(where.home, address) | variables(where)
            done = await anyio.run_process(
                [str(programs / "claude"), "-p", "go", "--allowedTools", "mcp__sandbox"],
                cwd=project,
                env=env,
                check=False,
            )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert first.heard[0].startswith("42\n")
    assert first.heard[1] == "     1\tkept"
    assert other.heard[0].startswith("end\n")
