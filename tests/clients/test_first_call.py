"""`init` proves what it wrote: the command in the file really reaches a sandbox."""

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import Done, Place, command, control, ended, place, running
from tests.e2e.attacks import WHOLE


async def init(where: Place, *arguments: str, **variables: str) -> Done:
    """Run it in the project of this place as a user does."""
    project = where.home / "project"
    project.mkdir(exist_ok=True)
    known = {"MCP_SANDBOX_SOCKET": str(where.socket), "MCP_SANDBOX_BACKEND": where.backend}
    env = {**where.environment(), **known, "MCP_SANDBOX_DATA_DIR": str(where.data), **variables}
    return await ended(["init", *arguments], env=env, cwd=str(project))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncGenerator[Place]:
    """A home without a daemon; one that was started meanwhile is asked to end."""
    where = place(tmp_path)
    yield where
    if where.socket.exists():
        with anyio.fail_after(20):
            await control(where, "shutdown")
            while where.socket.exists():
                await anyio.sleep(0.02)


@pytest.mark.parametrize(
    "client",
    # The files of these differ in one key, and the command in them is the same.
    ["claude", "inspector", *(pytest.param(name, marks=WHOLE) for name in ("cursor", "vscode"))],
)
async def test_the_first_call_starts_a_daemon_and_runs_in_a_sandbox(
    client: str, home: Place
) -> None:
    done = await init(home, client, "--yes")
    assert done.code == 0, done.err
    proof, following = done.out.splitlines()[-2:]
    assert proof.startswith("print(6 * 7) in a sandbox answered 42 after ")
    assert following.startswith("Next: ")


async def test_a_call_that_fails_says_why_and_the_file_stays(home: Place) -> None:
    done = await init(
        home, "claude", "--yes", MCP_SANDBOX_BACKEND="docker", DOCKER_HOST="unix:///x"
    )
    assert done.code == 1
    told = done.err
    assert "the file is written, but a first call through it failed" in told
    assert "no Docker engine" in told
    assert "mcp-sandbox doctor" in told
    assert (home.home / "project" / ".mcp.json").exists()


@pytest.mark.parametrize("client", ["claude", "inspector"])
async def test_a_server_at_an_address_is_called_with_the_token_of_the_environment(
    client: str, tmp_path: Path
) -> None:
    where = place(tmp_path)
    added = await command(where, "token add", "anna", "--data", str(where.data), asks=False)
    token = added.out.split()[-1]
    async with running(where, "--http", "127.0.0.1:0"):
        address = (await control(where, "status"))["result"]["http"]
        done = await init(where, client, "--yes", "--http", address, SANDBOX_TOKEN=token)
        assert done.code == 0, done.err
        assert "answered 42" in done.out
        assert token not in done.out
    written = [path.read_text() for path in where.home.rglob("*.json") if path.is_file()]
    assert not any(token in text for text in written)


async def test_a_wrong_or_missing_token_is_told_of(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where, "--http", "127.0.0.1:0"):
        address = (await control(where, "status"))["result"]["http"]
        wrong = await init(where, "cursor", "--yes", "--http", address, SANDBOX_TOKEN="x" * 43)
        assert wrong.code == 1
        assert "a first call through it failed" in wrong.err
        unset = await init(where, "cursor", "--yes", "--http", address)
        assert unset.code == 1
        assert "SANDBOX_TOKEN is not set" in unset.err


async def test_an_address_is_checked_before_anything_is_written(home: Place) -> None:
    for address in ("localhost:80", "http://me:key@x/mcp"):
        done = await init(home, "claude", "--yes", "--http", address)
        assert done.code == 1
        assert "address" in done.err
    done = await init(home, "claude", "--user", "--yes", "--http", "http://x")
    assert done.code == 2
    assert os.listdir(home.home / "project") == []


async def test_the_written_address_names_the_chat_of_the_folder(home: Place) -> None:
    assert (await init(home, "claude", "--yes", "--no-check", "--http", "https://x:1/")).code == 0
    text = (home.home / "project" / ".mcp.json").read_text()
    entry = json.loads(text)["mcpServers"]["sandbox"]
    assert entry["url"] == "https://x:1/mcp"
    assert entry["headers"]["Authorization"] == "Bearer ${SANDBOX_TOKEN}"
    assert entry["headers"]["Mcp-Sandbox-Chat"].startswith("dir-project-")
