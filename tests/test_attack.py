"""`doctor --attack`: it holds where there are walls, and breaks through where there are none."""

import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.config import Config, LimitsConfig
from mcp_sandbox.doctor import attack_inside as inside
from mcp_sandbox.doctor.attack import Attack, attack, set_out
from tests.conftest import configured
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, if_whole

pytestmark = pytest.mark.timeout(120)


async def attacked(config: Config) -> Attack:
    said = list[str]()
    with anyio.fail_after(100):
        found = await attack(config, said.append)
    assert f" of {len(inside.ATTEMPTS)} attempts" in said[-1]
    assert len(found.results) == len(inside.ATTEMPTS)
    return found


@pytest.mark.parametrize("backend_name", [DOCKER, if_whole(GVISOR)])
async def test_every_attempt_is_held_or_a_known_gap_and_nothing_is_left(
    backend_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = await attacked(configured(backend_name, tmp_path / "data"))
    assert [each for each in found.results if each.verdict == "BROKEN"] == []
    assert found.count("held") >= 25
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP])
async def test_with_allowed_hosts_the_door_and_the_placeholder_hold(
    backend_name: str, data_root: Path
) -> None:
    config = configured(backend_name, data_root).model_copy(update={"network": "allowlist"})
    found = await attacked(config)
    assert [each for each in found.results if each.verdict != "held"] == []


@pytest.mark.bubblewrap
def test_without_walls_ten_are_broken_and_the_command_fails(tmp_path: Path) -> None:
    how = ["doctor", "--attack", "--backend", "unsafe-local", "--json", "--data", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sandbox", *how], capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    results: list[dict[str, str]] = json.loads(done.stdout)["results"]
    broken = [each for each in results if each["verdict"] == "BROKEN"]
    assert len(broken) >= 10
    assert {"files", "system calls", "network", "limits"} <= {each["group"] for each in broken}
    assert all(each["evidence"] for each in results)


def is_held(at: dict[str, Any]) -> bool:
    """Make an attempt on this machine, with no sandbox around it."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", inspect.getsource(inside)],
            input=json.dumps(at),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            start_new_session=True,
        )
    assert "Traceback" not in done.stderr
    return done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="whether root is held is asked as root")
def test_each_attempt_succeeds_where_there_is_no_sandbox(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        at = set_out(Path(name), stack, Config(data_dir=tmp_path, limits=LimitsConfig()))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(f"\0{at['hidden']}")
        hidden.listen()
        small = dict.fromkeys(("memory_mb", "file_mb", "tmp_mb", "shm_mb", "pids"), 4)
        beside = {"other": at["canary"], "beside_port": at["port"], "beside": at["process"]}
        # What ends it by a limit, and what depends on where the machine mounts what.
        left_out = (inside.TIME, "files: see mounts of the host")
        attempts = [each for each in inside.ATTEMPTS if each not in left_out]
        told = {**at, **small, **beside, "open_files": 4}
        assert [each for each in attempts if is_held({**told, "attempt": each})] == []
