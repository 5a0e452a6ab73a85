import os
import socket
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends import local_socket
from mcp_sandbox.errors import SandboxGone


def listen(path: Path) -> socket.socket:
    """A listening socket at a path of any length."""
    folder = os.open(path.parent, os.O_PATH)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)
    server.listen()
    return server


async def test_bytes_flow_both_ways(tmp_path: Path) -> None:
    with listen(tmp_path / "runner.sock") as server, anyio.fail_after(5):
        stream = await local_socket.connect(tmp_path, deadline_s=1)
        peer, _ = server.accept()
        with peer:
            await stream.send(b"ping")
            assert peer.recv(10) == b"ping"
            peer.sendall(b"pong")
            assert await stream.receive() == b"pong"
        await stream.aclose()


async def test_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    with listen(deep / "runner.sock") as server, anyio.fail_after(5):
        async with await local_socket.connect(deep, deadline_s=1) as stream:
            await stream.send(b"fine")
            with server.accept()[0] as taken:
                assert taken.recv(10) == b"fine"


async def test_planted_link_to_another_socket_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    with listen(outside / "host.sock") as host, anyio.fail_after(5):
        (inside / "runner.sock").symlink_to(outside / "host.sock")
        with pytest.raises(SandboxGone, match="was replaced"):
            await local_socket.connect(inside, deadline_s=1)
        host.setblocking(False)
        with pytest.raises(BlockingIOError):
            host.accept()


async def test_linked_directory_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with listen(real / "runner.sock"), pytest.raises(SandboxGone, match="was replaced"):
        await local_socket.connect(tmp_path / "link", deadline_s=1)


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: Path(path).touch()])
async def test_anything_but_a_socket_is_refused(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / "runner.sock")
    with anyio.fail_after(5), pytest.raises(SandboxGone, match="was replaced"):
        await local_socket.connect(tmp_path, deadline_s=1)


async def test_missing_directory_says_the_sandbox_is_gone(tmp_path: Path) -> None:
    with anyio.fail_after(5), pytest.raises(SandboxGone, match="has ended"):
        await local_socket.connect(tmp_path / "no", deadline_s=1)


async def test_deadline_is_kept_and_nothing_leaks(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(str(tmp_path / "runner.sock"))
        server.listen(0)
        # Its queue is full.
        first.connect(str(tmp_path / "runner.sock"))
        with anyio.fail_after(5), pytest.raises(SandboxGone, match=r"within 0\.05 s"):
            await local_socket.connect(tmp_path, deadline_s=0.05)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("stays", [True, False])
async def test_nobody_waits_for_a_runner_that_has_ended(tmp_path: Path, stays: bool) -> None:
    local_socket.listen(tmp_path).close()
    if not stays:
        (tmp_path / "runner.sock").unlink()
    with anyio.fail_after(5), pytest.raises(SandboxGone, match="has ended"):
        await local_socket.connect(tmp_path, deadline_s=60)


async def test_what_a_runner_is_given_ends_with_it(tmp_path: Path) -> None:
    """A runner that dies before it has taken its socket leaves none that seems to listen."""
    line, starter = socket.socketpair()
    with line:
        local_socket.hand_over(line, tmp_path, b"secret")
        starter.close()
    with anyio.fail_after(5), pytest.raises(SandboxGone, match="has ended"):
        await local_socket.connect(tmp_path, deadline_s=60)


async def test_a_runner_that_has_ended_is_given_nothing(tmp_path: Path) -> None:
    line, starter = socket.socketpair()
    starter.close()
    with line:
        assert not await local_socket.await_runner(line, within_s=5)
        with pytest.raises(SandboxGone, match="call again"):
            local_socket.hand_over(line, tmp_path, b"secret")
