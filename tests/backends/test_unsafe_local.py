import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend
from mcp_sandbox.backends.unsafe_local import UnsafeLocalBackend
from mcp_sandbox.errors import SandboxGone
from tests.backends.live import connected, left, made, proc, spec_for, state_of


@pytest.fixture
def backend(data_root: Path) -> UnsafeLocalBackend:
    return UnsafeLocalBackend(data_root)


async def test_code_runs_in_the_mounts_sources_and_says_it_is_unsafe(
    backend: UnsafeLocalBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(50), caplog.at_level(logging.WARNING):
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:
            result = await runtime.exec("pwd; cd; pwd; echo x > made")
            assert "no isolation" in sandbox.facts.isolation
            assert set(sandbox.facts.limits.values()) == {"not limited: no isolation"}
    assert result.stdout == f"{tmp_path}/workspace\n{tmp_path}/home\n"
    assert (tmp_path / "home" / "made").read_text() == "x\n"
    assert "no isolation" in caplog.text


async def test_servers_environment_and_token_stay_away(
    backend: UnsafeLocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "abc123")
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:
            result = await runtime.exec("env")
    assert "SERVER_SECRET" not in result.stdout
    assert sandbox.token.hex() not in result.stdout


async def test_data_root_deeper_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    backend = UnsafeLocalBackend(deep)
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.exec("echo in")).stdout == "in\n"


async def test_destroying_ends_the_runner_and_all_below_it(
    backend: UnsafeLocalBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(spec_for(tmp_path))
        async with connected(sandbox) as runtime:
            result = await runtime.exec("setsid sleep 600 >/dev/null 2>&1 & echo $!")
        child = os.pidfd_open(int(result.stdout))
        await backend.destroy(sandbox.id)
        await anyio.wait_readable(child)
        os.close(child)
        await backend.destroy(sandbox.id)
        with pytest.raises(SandboxGone):
            await backend.attach(sandbox.id)
    assert not left(data_root)


async def test_stopped_runner_is_ended_with_all_below_it(
    backend: UnsafeLocalBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        sandbox = await backend.create(spec_for(tmp_path))
        async with connected(sandbox) as runtime:
            result = await runtime.exec("setsid sleep 600 >/dev/null 2>&1 & echo $!")
            pid = state_of(data_root, sandbox.id)["process"]["pid"]
            child = os.pidfd_open(int(result.stdout))
            os.kill(pid, signal.SIGSTOP)
            await backend.destroy(sandbox.id)
            await anyio.wait_readable(child)
            os.close(child)
    with pytest.raises(FileNotFoundError):
        proc(pid, "stat")
    assert not left(data_root)


async def test_backends_of_one_data_root_leave_each_other_alone(
    backend: UnsafeLocalBackend, tmp_path: Path, data_root: Path
) -> None:
    other = BubblewrapBackend(data_root)
    with anyio.fail_after(50):
        spec = replace(spec_for(tmp_path), labels={"chat": "c"})
        async with made(backend, spec) as sandbox:
            assert list(await other.running()) == []
            await other.destroy(sandbox.id)
            with pytest.raises(SandboxGone):
                await other.attach(sandbox.id)
            (row,) = await backend.running()
            assert (row.id, dict(row.labels)) == (sandbox.id, {"chat": "c"})
            async with connected(await UnsafeLocalBackend(data_root).attach(row.id)) as runtime:
                assert (await runtime.exec("echo on")).stdout == "on\n"


async def test_half_made_sandbox_of_a_dead_server_is_swept_and_of_a_living_one_is_not(
    backend: UnsafeLocalBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox:
            state = state_of(data_root, sandbox.id) | {"process": None}
            half = data_root / "sandbox/run/mcs-00000000000000aa"
            (half / "sock").mkdir(parents=True)
            (half / "state.json").write_text(json.dumps(state))
            assert len(await backend.running()) == 1
            assert half.exists()
            state["maker"]["started"] += 1
            (half / "state.json").write_text(json.dumps(state))
            assert len(await backend.running()) == 1
            assert not half.exists()
