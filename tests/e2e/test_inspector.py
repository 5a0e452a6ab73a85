"""The MCP Inspector as a client, over stdio and HTTP: in both protocol eras it uses the tools."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.daemon.http import serving
from tests.daemon.running import place
from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, if_whole
from tests.server.skills.shelves import write_skill
from tests.server.test_tools import TABLE

ROOT = Path(__file__).parents[2]
TOOL_ERROR = 5
UNSUPPORTED = 1
# Values that readers of YAML differ about, and names that uris have to encode.
AWKWARD: Mapping[str, str | bytes] = {
    "SKILL.md": """---
name: awkward
description: >-
  Folded
  text: with a colon
version: 1.0
day: 2026-01-01
on: yes
~: nothing
1.50: x
hex: 0x1F
octal: 017
list: [1, "1", ~, {a: .5}]
empty:
text: |
  two
  lines
---
# Awkward\r
""",
    "references/a b%.bin": b"\xff\x00",
}

pytestmark = [pytest.mark.inspector, pytest.mark.slow, pytest.mark.timeout(400)]


class Inspector:
    """Starts the Inspector's command line for one request each, to a server that `target` names."""

    def __init__(self, programs: Path, era: str, target: Sequence[str], home: Path) -> None:
        self.era = era
        self._command = [str(programs / "node"), str(programs / "mcp-inspector")]
        self._command += ["--cli", "--format", "json", "-q", "--protocol-era", era, *target]
        self._env = {**os.environ, "HOME": str(home)}

    async def ask(self, *options: str, code: int = 0) -> Any:
        """The result that the Inspector prints; it must end with this exit code."""
        with anyio.fail_after(90):
            done = await anyio.run_process(
                [*self._command, *options], check=False, env=self._env, cwd=ROOT
            )
        assert done.returncode == code, done.stderr.decode()
        return json.loads(done.stdout)["result"]

    async def verified(self) -> list[Any]:
        """What the Inspector finds of each skill, all of whose files it reads and compares."""
        with anyio.fail_after(90):
            done = await anyio.run_process(
                [*self._command, "--method", "skills/list", "--verify"],
                check=False,
                env=self._env,
                cwd=ROOT,
            )
        assert done.returncode in {0, UNSUPPORTED}, done.stdout.decode() + done.stderr.decode()
        if done.returncode:
            assert json.loads(done.stderr)["error"]["code"] == "skills_unsupported"
        return [json.loads(line) for line in done.stdout.splitlines()]

    async def call(self, tool: str, arguments: Mapping[str, object], *, code: int = 0) -> str:
        """The first text of a tool's result."""
        options = ("--tool-name", tool, "--tool-args-json", json.dumps(arguments))
        result = await self.ask("--method", "tools/call", *options, code=code)
        text: str = result["content"][0]["text"]
        return text


@asynccontextmanager
async def over_stdio(backend: str, folder: Path) -> AsyncGenerator[list[str]]:
    """The Inspector starts a server of its own for each request."""
    target = [sys.executable, "-m", "mcp_sandbox", "stdio", "--chat", "inspected"]
    yield [*target, "--data", str(folder / "data"), "--backend", backend]


@asynccontextmanager
async def over_http(backend: str, folder: Path) -> AsyncGenerator[list[str]]:
    """A daemon serves all requests, which bring a token."""
    async with serving(place(folder, backend), limit_s=300) as served:
        _, secret = await served.token("inspector")
        target = ["--server-url", served.url, "--header", f"Authorization: Bearer {secret}"]
        yield [*target, "--header", "Mcp-Sandbox-Chat: inspected"]


STDIO = pytest.param(
    (over_stdio, "bubblewrap", "legacy"), marks=BUBBLEWRAP.marks, id="stdio-legacy"
)
HTTP = pytest.param((over_http, "bubblewrap", "modern"), marks=BUBBLEWRAP.marks, id="http-modern")
OTHERS = [
    pytest.param((over_stdio, "bubblewrap", "modern"), marks=BUBBLEWRAP.marks, id="stdio-modern"),
    pytest.param((over_http, "bubblewrap", "legacy"), marks=BUBBLEWRAP.marks, id="http-legacy"),
]
# Over stdio each request starts a server: one test shows that it is the same there.
over_both = pytest.mark.parametrize(
    "inspector", [STDIO, HTTP, *map(if_whole, OTHERS)], indirect=True
)


@pytest.fixture(params=[if_whole(STDIO), HTTP, *map(if_whole, OTHERS)])
async def inspector(
    request: pytest.FixtureRequest, npm_cache: Path, tmp_path: Path
) -> AsyncGenerator[Inspector]:
    reach, backend, era = request.param
    programs = npm.installed("inspector", npm_cache)
    async with reach(backend, tmp_path) as target:
        yield Inspector(programs, era, target, tmp_path)


async def test_the_tools_are_listed_and_their_schemas_are_portable(inspector: Inspector) -> None:
    listed = await inspector.ask("--method", "tools/list", "--strict")
    assert [tool["name"] for tool in listed["tools"]] == [*TABLE, "skills_list", "skill_activate"]


async def test_skills_are_to_the_byte_what_their_manifests_say(
    inspector: Inspector, tmp_path: Path
) -> None:
    for user in ("local", "inspector"):
        write_skill(tmp_path / "data" / "skills" / user, "awkward", AWKWARD)
    verified = {each["name"]: each for each in await inspector.verified()}
    if inspector.era == "legacy":
        # The older protocol has no word for extensions.
        assert verified == {}
        return
    assert verified.keys() == {"awkward", *(each.name for each in (ROOT / "skills").iterdir())}
    for each in verified.values():
        assert each["ok"], each
        assert each["outcome"] == "verified"
        assert each["conformance"] == each["frontmatter"] == []
    assert [file["status"] for file in verified["awkward"]["files"]] == ["verified"] * 2


@over_both
async def test_code_runs_and_files_are_there_for_the_next_server(inspector: Inspector) -> None:
    assert await inspector.call("run_code", {"code": "print(6 * 7)"}) == "42\n"
    written = await inspector.call("write_file", {"path": "a/b.txt", "content": "kept\n"})
    assert written == "created a/b.txt (5 bytes)"
    assert await inspector.call("read_file", {"path": "a/b.txt"}) == "     1\tkept"


async def test_a_failing_call_is_a_tool_error(inspector: Inspector) -> None:
    told = await inspector.call("read_file", {"path": "absent"}, code=TOOL_ERROR)
    assert "no such file" in told
