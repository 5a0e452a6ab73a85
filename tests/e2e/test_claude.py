"""The Claude command line as a client, with a scripted model: no request leaves the machine."""

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.messages_api import Script, serving

ROOT = Path(__file__).parents[2]
NO_FURTHER_REQUESTS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # Whatever still wants to leave the machine finds nobody.
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}
CODE = "open('note.txt', 'w').write('kept\\n'); print(6 * 7)"
CALLS = (
    ("mcp__sandbox__run_code", {"code": CODE}),
    ("mcp__sandbox__read_file", {"path": "note.txt"}),
)


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend_name", [BUBBLEWRAP, DOCKER])
async def test_claude_runs_code_and_reads_the_file_that_it_made(
    backend_name: str, npm_cache: Path, tmp_path: Path
) -> None:
    programs = npm.installed("claude", npm_cache)
    project = make_project(tmp_path, backend_name)
    script = Script(CALLS, last_words="The note says: kept.")
    with serving(script) as address, anyio.fail_after(110):
        done = await anyio.run_process(
            [str(programs / "claude"), "-p", "go", "--allowedTools", "mcp__sandbox"],
            cwd=project,
            env=environment(tmp_path / "home", address),
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert done.stdout.decode().strip() == script.last_words
    assert script.heard[0].startswith("42\n")
    assert script.heard[1] == "     1\tkept"


def make_project(folder: Path, backend: str) -> Path:
    """A project as a user sets it up: `.mcp.json`, and the consent to it."""
    arguments = ["-m", "mcp_sandbox", "stdio", "--chat", "claude", "--backend", backend]
    arguments += ["--data", str(folder / "data")]
    server = {"command": sys.executable, "args": arguments, "env": {"PYTHONPATH": str(ROOT)}}
    project = folder / "project"
    (project / ".claude").mkdir(parents=True)
    (folder / "home").mkdir()
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"sandbox": server}}))
    consent = json.dumps({"enabledMcpjsonServers": ["sandbox"]})
    (project / ".claude" / "settings.local.json").write_text(consent)
    return project


def environment(home: Path, address: str) -> dict[str, str]:
    """Nothing of the caller's own account, and no other address than ours."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "not-a-key",
        # Project servers connect in the background otherwise, and tools are shown by name only.
        "MCP_CONNECTION_NONBLOCKING": "0",
        "ENABLE_TOOL_SEARCH": "false",
        **NO_FURTHER_REQUESTS,
    }
