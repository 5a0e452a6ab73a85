"""Bubblewrap with its walls off: the host and the same paths as everywhere."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends.bubblewrap.arguments import show_host_root
from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend
from mcp_sandbox.errors import BackendUnavailable, SandboxGone
from mcp_sandbox.models import Mount
from tests.backends.live import connected, made, say, spec_for, state_of

pytestmark = pytest.mark.bubblewrap


@pytest.fixture
def backend(data_root: Path) -> BubblewrapBackend:
    return BubblewrapBackend(data_root, walls=False)


def made_on_the_host() -> list[str]:
    """The mount points of a sandbox that the host has."""
    points = ("/workspace", "/home/sandbox", "/mnt/user-data", "/opt/mcp-sandbox", "/opt/bin")
    return [point for point in points if Path(point).exists()]


async def test_all_of_the_host_is_there_and_the_sandboxs_own_places_too(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    shared = Mount(tmp_path / "shared", "/mnt/user-data/shared")
    before = made_on_the_host()
    said = await say(
        backend,
        spec_for(tmp_path, [shared]),
        "pwd; cd; pwd; echo x > made; echo y > /mnt/user-data/shared/made; "
        "ls -d /root /boot /etc/hostname; stat -Lc %i /var /etc; readlink /proc/self/ns/net",
    )
    host = [f"{Path(path).stat().st_ino}" for path in ("/var", "/etc")]
    assert said.split() == [
        *("/workspace", "/home/sandbox", "/boot", "/etc/hostname", "/root", *host),
        str(Path("/proc/self/ns/net").readlink()),
    ]
    assert (tmp_path / "home" / "made").read_text() == "x\n"
    assert (tmp_path / "shared" / "made").read_text() == "y\n"
    # The mount points were made in the sandbox alone.
    assert made_on_the_host() == before


async def test_the_hosts_tmp_is_the_sandboxs(backend: BubblewrapBackend, tmp_path: Path) -> None:
    mark = Path("/tmp", f"mcp-sandbox-{os.getpid()}")
    try:
        await say(backend, spec_for(tmp_path), f"echo here > {mark}")
        assert mark.read_text() == "here\n"
    finally:
        mark.unlink(missing_ok=True)


def test_only_a_folder_that_has_every_mount_point_is_bound_whole(tmp_path: Path) -> None:
    (tmp_path / "whole/point").mkdir(parents=True)
    (tmp_path / "lacking/other").mkdir(parents=True)
    (tmp_path / "linked").symlink_to("whole")
    (tmp_path / "point").mkdir()
    found = show_host_root(
        [f"{tmp_path}/{name}" for name in ("whole/point", "lacking/point", "linked/x", "point")],
        "/tmp",
        Path(tmp_path),
    )
    assert found[5:] == [
        *("--dir", f"{tmp_path}/lacking"),
        *("--bind-try", f"{tmp_path}/lacking/other", f"{tmp_path}/lacking/other"),
        *("--bind-try", f"{tmp_path}/whole", f"{tmp_path}/whole"),
    ]


async def test_a_sandbox_without_walls_says_so(
    backend: BubblewrapBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(50), caplog.at_level(logging.WARNING):
        assert "NO isolation" in await backend.probe()
        async with made(backend, spec_for(tmp_path)) as sandbox:
            assert (backend.name, sandbox.facts.backend) == ("unsafe-local", "unsafe-local")
            assert sandbox.facts.isolation.startswith("no isolation")
            assert sandbox.facts.network.startswith("open")
            assert "not limited" in sandbox.facts.limits["tmp"]
    assert "no isolation" in caplog.text


async def test_servers_environment_and_token_stay_away(
    backend: BubblewrapBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "abc123")
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:
            result = await runtime.exec("env")
    assert "SERVER_SECRET" not in result.stdout
    assert sandbox.token.hex() not in result.stdout


async def test_where_bubblewrap_cannot_run_it_is_refused_with_words(
    backend: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.backends.bubblewrap.host._candidates", list)
    with pytest.raises(BackendUnavailable, match="apt-get install bubblewrap"):
        await backend.probe()


async def test_data_root_deeper_than_a_socket_address_works(tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path / ("d" * 100) / ("e" * 100), walls=False)
    assert await say(backend, spec_for(tmp_path), "echo in") == "in\n"


async def test_backends_of_one_data_root_leave_each_other_alone(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
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
            second = BubblewrapBackend(data_root, walls=False)
            async with connected(await second.attach(row.id)) as runtime:
                assert (await runtime.exec("echo on")).stdout == "on\n"


async def test_half_made_sandbox_of_a_dead_server_is_swept_and_of_a_living_one_is_not(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox:
            state = state_of(data_root, sandbox.id) | {
                "process": None,
                "launcher": None,
                "cgroups": [],
            }
            half = data_root / "sandbox/run/mcs-00000000000000aa"
            (half / "sock").mkdir(parents=True)
            (half / "state.json").write_text(json.dumps(state))
            assert len(await backend.running()) == 1
            assert half.exists()
            state["maker"]["started"] += 1
            (half / "state.json").write_text(json.dumps(state))
            assert len(await backend.running()) == 1
            assert not half.exists()
