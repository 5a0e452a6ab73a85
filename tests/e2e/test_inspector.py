"""The MCP Inspector as a client: in both protocol eras it lists the tools and calls them."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.server.test_tools import TABLE

ROOT = Path(__file__).parents[2]
TOOL_ERROR = 5

pytestmark = [pytest.mark.inspector, pytest.mark.slow, pytest.mark.timeout(400)]


class Inspector:
    """Starts the Inspector's command line, which starts our server, for one request each."""

    def __init__(self, programs: Path, backend: str, era: str, folder: Path) -> None:
        self._command = [str(programs / "node"), str(programs / "mcp-inspector")]
        self._command += ["--cli", "--format", "json", "-q", "--protocol-era", era]
        self._command += [sys.executable, "-m", "mcp_sandbox", "stdio", "--chat", "inspected"]
        self._command += ["--data", str(folder / "data"), "--backend", backend]
        self._env = {**os.environ, "HOME": str(folder)}

    async def ask(self, *options: str, code: int = 0) -> Any:
        """The result that the Inspector prints; it must end with this exit code."""
        with anyio.fail_after(90):
            done = await anyio.run_process(
                [*self._command, *options], check=False, env=self._env, cwd=ROOT
            )
        assert done.returncode == code, done.stderr.decode()
        return json.loads(done.stdout)["result"]

    async def call(self, tool: str, arguments: Mapping[str, object], *, code: int = 0) -> str:
        """The first text of a tool's result."""
        options = ("--tool-name", tool, "--tool-args-json", json.dumps(arguments))
        result = await self.ask("--method", "tools/call", *options, code=code)
        text: str = result["content"][0]["text"]
        return text


@pytest.fixture(
    params=[
        pytest.param(("bubblewrap", "legacy"), marks=BUBBLEWRAP.marks, id="bubblewrap-legacy"),
        pytest.param(("bubblewrap", "modern"), marks=BUBBLEWRAP.marks, id="bubblewrap-modern"),
        pytest.param(("docker", "modern"), marks=DOCKER.marks, id="docker-modern"),
    ]
)
def inspector(request: pytest.FixtureRequest, npm_cache: Path, tmp_path: Path) -> Inspector:
    backend, era = request.param
    return Inspector(npm.installed("inspector", npm_cache), backend, era, tmp_path)


async def test_the_tools_are_listed_and_their_schemas_are_portable(inspector: Inspector) -> None:
    listed = await inspector.ask("--method", "tools/list", "--strict")
    assert [tool["name"] for tool in listed["tools"]] == list(TABLE)


async def test_code_runs_and_files_are_there_for_the_next_server(inspector: Inspector) -> None:
    assert await inspector.call("run_code", {"code": "print(6 * 7)"}) == "42\n"
    written = await inspector.call("write_file", {"path": "a/b.txt", "content": "kept\n"})
    assert written == "created a/b.txt (5 bytes)"
    assert await inspector.call("read_file", {"path": "a/b.txt"}) == "     1\tkept"


async def test_a_failing_call_is_a_tool_error(inspector: Inspector) -> None:
    told = await inspector.call("read_file", {"path": "absent"}, code=TOOL_ERROR)
    assert "no such file" in told
