"""The start of a runner that is told its token by a file."""

import secrets
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.runner.test_protocol import PYTHON, RUNNER, Runner


def test_a_runner_has_its_token_before_anybody_can_connect(tmp_path: Path) -> None:
    settings = {
        "MCP_SANDBOX_TOKEN_FILE": str(tmp_path / "missing"),
        "MCP_SANDBOX_SOCKET": str(tmp_path / "runner.sock"),
    }
    done = subprocess.run([PYTHON, RUNNER], env=settings, capture_output=True, check=False)
    assert b"FileNotFoundError" in done.stderr
    assert not (tmp_path / "runner.sock").exists()


@pytest.fixture
def start_up_file(tmp_path: Path) -> Path:
    """Runs in every Python of the home; what is there once it has run."""
    home, ran = tmp_path / "home", tmp_path / "ran"
    where = [PYTHON, "-m", "site", "--user-site"]
    found = subprocess.run(where, env={"HOME": str(home)}, capture_output=True, check=False)
    folder = Path(found.stdout.decode().strip())
    folder.mkdir(parents=True)
    (folder / "usercustomize.py").write_text(f"open({str(ran)!r}, 'w').close()")
    return ran


@pytest.fixture
def ordinary(tmp_path: Path) -> Generator[Runner]:
    """A runner whose pid 1 is an ordinary Python."""
    token = secrets.token_bytes(32)
    (tmp_path / "token").write_text(token.hex())
    settings = {
        "MCP_SANDBOX_TOKEN_FILE": str(tmp_path / "token"),
        "MCP_SANDBOX_SOCKET": str(tmp_path / "runner.sock"),
        "MCP_SANDBOX_WORKSPACE": str(tmp_path),
        "MCP_SANDBOX_ENV_HOME": str(tmp_path / "home"),
        "HOME": "/nonexistent",
    }
    with subprocess.Popen([PYTHON, RUNNER], env=settings) as process:
        yield Runner(process, tmp_path, token)
        process.terminate()


async def test_start_up_files_of_a_chat_run_only_for_who_has_proved_the_token(
    start_up_file: Path, ordinary: Runner
) -> None:
    for _ in range(20):
        stream = await ordinary.stream()
        await stream.receive()
        await stream.aclose()
    assert not start_up_file.exists()
    async with ordinary.channel() as channel:
        await channel.call("run", {"language": "python", "code_bytes": 4}, body=b"pass")
    assert start_up_file.exists()
