"""Claude starts a server of its own: nothing else than the project's file is needed."""

import json
import sys
from pathlib import Path

import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.claude import Claude, consent
from tests.e2e.messages_api import Script

ROOT = Path(__file__).parents[2]
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
    await Claude(programs, project, tmp_path / "home", {}).follow(script)
    assert script.heard[0].startswith("42\n")
    assert script.heard[1] == "     1\tkept"


def make_project(folder: Path, backend: str) -> Path:
    """A project as a user sets it up: `.mcp.json`, and the consent to it."""
    arguments = ["-m", "mcp_sandbox", "stdio", "--chat", "claude", "--backend", backend]
    arguments += ["--data", str(folder / "data")]
    server = {"command": sys.executable, "args": arguments, "env": {"PYTHONPATH": str(ROOT)}}
    project = folder / "project"
    project.mkdir()
    (folder / "home").mkdir()
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"sandbox": server}}))
    consent(project)
    return project
