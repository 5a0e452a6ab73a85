"""Whoever connects to a daemon, and however: it is bounded, and the others do not notice."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import Place, dialled, in_chat, place, running

CONNECT = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print(client.recv(1000).decode())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users of the machine can reach."""
    folder = Path(tempfile.mkdtemp(prefix="mcs-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_before_a_byte_is_read(open_folder: Path) -> None:
    where = place(open_folder)
    async with running(where) as daemon:
        # Only the kernel's word on who connects keeps the other user out now.
        where.socket.parent.chmod(0o755)
        where.socket.chmod(0o666)
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = await anyio.run_process([*user, sys.executable, "-c", CONNECT, str(where.socket)])
        assert "serves another user" in json.loads(done.stdout)["error"]
        await daemon.noted("uid 65534")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[" * 8000 + b"\n", "not JSON"),
        (b"{}\n", "mcp-sandbox"),
        (b"x" * 100_000, "65536 bytes"),
        (b'{"mcp-sandbox": 2, "role": "chat"}\n', "mcp-sandbox"),
        (b'{"mcp-sandbox": 1, "role": "root"}\n', "role"),
        (b'{"mcp-sandbox": 1, "role": "chat"}\n', "which chat"),
        (b'{"mcp-sandbox": 1, "role": "chat", "chat": "../x"}\n', "not usable"),
        (b'{"mcp-sandbox": 1, "role": "chat", "chat": ""}\n', "not usable"),
        (b'{"mcp-sandbox": 1, "role": "chat", "chat": "a", "user": "b/c"}\n', "not usable"),
        (b'{"mcp-sandbox": 1, "role": "chat", "chat": 7}\n', '"chat" must be text'),
        (b'{"mcp-sandbox": 1, "role": "chat", "project": "here"}\n', "absolute"),
        (b'{"mcp-sandbox": 1, "role": "chat", "project": "/\\ud800"}\n', "absolute"),
        (b'{"mcp-sandbox": 1, "role": "chat", "fresh": "../../x"}\n', "which chat"),
        (b'{"mcp-sandbox": 1, "role": "control", "arguments": []}\n', "must be an object"),
    ],
)
async def test_a_first_line_that_cannot_be_is_refused_in_words(
    served: Place, line: bytes, reason: str
) -> None:
    async with dialled(served) as client:
        await client.stream.send(line)
        answer = await client.receive()
        assert answer["ok"] is False
        assert reason in answer["error"]
        assert await client.hung_up() == b""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon that all cases of a test share."""
    where = place(tmp_path_factory.mktemp("served"))
    arguments = ("--data", str(where.data), "--backend", where.backend)
    process = subprocess.Popen(where.command("serve", *arguments), env=where.environment())
    with socket.socket(socket.AF_UNIX) as knock:
        while process.poll() is None and knock.connect_ex(str(where.socket)) != 0:
            os.sched_yield()
    yield where
    process.terminate()
    assert process.wait(20) == 0


@pytest.mark.slow
async def test_silent_and_slow_clients_are_sent_away_after_ten_seconds(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), dialled(where) as silent, dialled(where) as slow:

        async def drip() -> None:
            for byte in b'{"mcp-sandbox": 1' * 100:
                await slow.stream.send(bytes([byte]))
                await anyio.sleep(0.5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drip)
            for client in (silent, slow):
                assert "no first line" in (await client.receive())["error"]
            tasks.cancel_scope.cancel()


async def test_silent_clients_keep_nobody_out(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        crowd = [await anyio.connect_unix(where.socket) for _ in range(300)]
        async with in_chat(where, "a") as client:
            assert await client.exec("echo served") == "served\n"
        assert b"too many clients" in await crowd[0].receive()
        for stream in crowd:
            await stream.aclose()


async def test_connections_are_bounded(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SERVE__MAX_CONNECTIONS": "2"})
    async with running(where), in_chat(where, "a"), in_chat(where, "b") as b:
        async with dialled(where) as client:
            assert "max_connections" in (await client.receive())["error"]
        assert await b.exec("echo served") == "served\n"


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_ten_thousand_connections_leave_nothing_behind(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where, limit_s=140) as daemon, in_chat(where, "a") as client:
        await client.exec("true")
        before = open_sockets(daemon.process.pid)
        await anyio.to_thread.run_sync(connect_and_drop, where.socket, 10_000)
        assert await client.exec("echo served") == "served\n"
        while open_sockets(daemon.process.pid) > before:
            await anyio.sleep(0.05)


def open_sockets(pid: int) -> int:
    """How many there are; other files are opened and closed meanwhile, also while we look."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(entry).startswith("socket:")
    return found


def connect_and_drop(path: Path, times: int) -> None:
    for number in range(times):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            if number % 3 == 0:
                client.send(b'{"mcp-sandbox"')


async def test_a_client_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "a") as greedy, in_chat(where, "a") as b:
        before = memory_kb(daemon.process.pid)
        await greedy.stream.send(
            b"".join(
                b'{"jsonrpc": "2.0", "id": %d, "method": "tools/list"}\n' % number
                for number in range(1000, 3000)
            )
        )
        for _ in range(20):
            assert await b.exec("echo served") == "served\n"
        assert memory_kb(daemon.process.pid) - before < 60_000


def memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


async def test_a_socket_that_was_taken_away_comes_back(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "a") as client:
        shutil.rmtree(where.socket.parent)
        await daemon.noted("listening on")
        async with in_chat(where, "a") as other:
            assert await other.exec("echo found") == "found\n"
        assert await client.exec("echo still here") == "still here\n"


async def test_what_takes_the_sockets_place_is_neither_used_nor_removed(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon:
        where.socket.unlink()
        where.socket.write_text("planted")
        await daemon.noted("is no socket")
    assert where.socket.read_text() == "planted"
