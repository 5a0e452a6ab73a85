"""How sandboxes of bubblewrap begin, are found again, and end."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend
from mcp_sandbox.errors import BackendUnavailable, SandboxGone
from mcp_sandbox.models import SandboxId
from tests.backends.live import connected, left, made, proc, say, spec_for, state_of

pytestmark = pytest.mark.bubblewrap

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="needs root")


@pytest.fixture
def backend(data_root: Path) -> BubblewrapBackend:
    return BubblewrapBackend(data_root)


@contextmanager
def ended(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def test_probe_makes_a_sandbox_and_leaves_nothing(
    backend: BubblewrapBackend, data_root: Path
) -> None:
    with anyio.fail_after(50):
        line = await backend.probe()
    assert line.startswith("bubblewrap 0.")
    assert (data_root / "sandbox").stat().st_mode & 0o777 == 0o700
    assert not left(data_root)
    assert not list((data_root / "sandbox").glob(".*"))


async def test_another_backend_of_the_same_data_attaches(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    spec = replace(spec_for(tmp_path), labels={"user": "u", "chat": "c"})
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox:
            other = BubblewrapBackend(data_root)
            (row,) = await other.running()
            assert (row.id, dict(row.labels)) == (sandbox.id, {"user": "u", "chat": "c"})
            found = await other.attach(row.id)
            assert found.token == sandbox.token
            assert found.facts == sandbox.facts
            async with connected(found) as runtime:
                assert (await runtime.exec("echo $((6*7))")).stdout == "42\n"
            await other.destroy(row.id)
            await other.destroy(row.id)
            with pytest.raises(SandboxGone, match="is not running"):
                await backend.attach(row.id)
            with pytest.raises(SandboxGone, match=r"has ended|is gone"):
                await sandbox.open_channel()
    assert not left(data_root, sandbox.id)


async def test_destroying_ends_everything_that_runs_inside(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(spec_for(tmp_path))
        state = state_of(data_root, sandbox.id)
        with ended(state["process"]["pid"]) as inner, ended(state["launcher"]["pid"]) as outer:
            async with anyio.create_task_group() as tasks, connected(sandbox) as runtime:
                started = anyio.Event()

                async def note(_stream: str, _data: bytes) -> None:
                    started.set()

                async def stubborn() -> None:
                    command = "trap '' TERM HUP; setsid sleep 600 & echo on; kill -STOP $$"
                    with pytest.raises(SandboxGone):
                        await runtime.exec(command, timeout_s=60, on_output=note)

                tasks.start_soon(stubborn)
                await started.wait()
                await backend.destroy(sandbox.id)
            await anyio.wait_readable(inner)
            await anyio.wait_readable(outer)
    assert not left(data_root, sandbox.id)
    with pytest.raises(FileNotFoundError):
        proc(state["launcher"]["pid"], "stat")


async def test_sandbox_outlives_a_killed_server(tmp_path: Path, data_root: Path) -> None:
    spec_for(tmp_path)
    script = (
        "import anyio, os, signal, sys; from pathlib import Path\n"
        "from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend\n"
        "from tests.backends.live import spec_for\n"
        f"b = BubblewrapBackend(Path({str(data_root)!r}))\n"
        f"s = anyio.run(b.create, spec_for(Path({str(tmp_path)!r})))\n"
        "print(s.id, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with anyio.fail_after(50):
        done = await anyio.run_process([sys.executable, "-c", script], check=False)
        assert done.returncode == -signal.SIGKILL
        sandbox_id = SandboxId(done.stdout.decode().strip())
        backend = BubblewrapBackend(data_root)
        async with connected(await backend.attach(sandbox_id)) as runtime:
            assert (await runtime.exec("echo alive")).stdout == "alive\n"
        await backend.destroy(sandbox_id)
    assert not left(data_root, sandbox_id)


async def test_dead_sandbox_is_reported_and_swept(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(spec_for(tmp_path))
        state = state_of(data_root, sandbox.id)
        with ended(state["launcher"]["pid"]) as launcher:
            os.kill(state["process"]["pid"], signal.SIGKILL)
            await anyio.wait_readable(launcher)
        with pytest.raises(SandboxGone, match="has ended"):
            await sandbox.open_channel()
        assert list(await backend.running()) == []
    assert not left(data_root, sandbox.id)


async def test_idle_sandbox_ends_itself(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(replace(spec_for(tmp_path), idle_s=0.2))
        state = state_of(data_root, sandbox.id)
        with ended(state["launcher"]["pid"]) as launcher:
            await anyio.wait_readable(launcher)
        assert list(await backend.running()) == []
    assert not left(data_root, sandbox.id)


async def test_number_of_another_process_is_not_taken_for_the_sandbox(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(spec_for(tmp_path))
        await backend.destroy(sandbox.id)
        again = await backend.create(spec_for(tmp_path))
        path = data_root / "sandbox/run" / again.id / "state.json"
        state = json.loads(path.read_text())
        async with await anyio.open_process(["sleep", "60"]) as stranger:
            forged = {**state, "process": {**state["process"], "pid": stranger.pid}}
            path.write_text(json.dumps(forged))
            with pytest.raises(SandboxGone):
                await backend.attach(again.id)
            path.write_text(json.dumps(state))
            await backend.destroy(again.id)
            assert stranger.returncode is None
            stranger.kill()


async def test_missing_directory_is_named_and_nothing_is_left(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    spec = spec_for(tmp_path)
    (tmp_path / "home").rmdir()
    with anyio.fail_after(50), pytest.raises(BackendUnavailable, match=r"No such file.*home"):
        await backend.create(spec)
    assert not left(data_root)


@as_root
async def test_linked_directory_is_refused(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    spec = spec_for(tmp_path)
    (tmp_path / "home").rmdir()
    (tmp_path / "home").symlink_to("/root")
    with anyio.fail_after(50), pytest.raises(BackendUnavailable, match="home"):
        await backend.create(spec)
    assert not left(data_root)


async def test_many_at_once_are_all_apart(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    said: dict[int, str] = {}

    async def one(number: int) -> None:
        spec = spec_for(tmp_path / str(number))
        said[number] = await say(
            backend, spec, f"echo {number} > f; cat /workspace/*; ls /proc | grep -c 0"
        )

    with anyio.fail_after(55):
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
    assert {number: text.split()[0] for number, text in said.items()} == {
        number: str(number) for number in range(8)
    }
    assert not left(data_root)


def _damage(copy: Path, how: str) -> None:
    main = copy / "mcp_sandbox/runner/wire/server.py"
    (compiled,) = main.parent.glob("__pycache__/server.*.pyc")
    for path in (main, compiled):
        if how == "garbage":
            path.write_bytes(os.urandom(path.stat().st_size))
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "flipped":
            data = path.read_bytes()
            path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        else:
            path.unlink()
            if how == "folder":
                path.mkdir()


@pytest.mark.parametrize("how", ["garbage", "empty", "flipped", "missing", "folder"])
async def test_a_damaged_copy_of_the_runner_is_made_anew(tmp_path: Path, how: str) -> None:
    spec, data = spec_for(tmp_path), tmp_path / "data"
    with anyio.fail_after(50):
        before = BubblewrapBackend(data)
        assert await say(before, spec, "echo fine") == "fine\n"
        (copy,) = (data / "sandbox").glob("runner-*[0-9a-f]")
        async with made(before, spec) as running, connected(running) as runtime:
            _damage(copy, how)
            assert await say(BubblewrapBackend(data), spec, "echo fine") == "fine\n"
            # What runs is left alone; the damaged copy is set aside under it.
            assert (await runtime.exec("echo still")).stdout == "still\n"


async def test_a_copy_that_does_not_start_any_more_is_looked_at_again(tmp_path: Path) -> None:
    spec, backend = spec_for(tmp_path), BubblewrapBackend(tmp_path / "data")
    with anyio.fail_after(50):
        assert await say(backend, spec, "echo fine") == "fine\n"
        (copy,) = (tmp_path / "data/sandbox").glob("runner-*")
        (copy / "mcp_sandbox/runner/__main__.py").write_bytes(os.urandom(4000))
        with pytest.raises((SandboxGone, BackendUnavailable)):
            await say(backend, spec, "echo fine")
        assert await say(backend, spec, "echo fine") == "fine\n"
