"""Connections to the HTTP door: silent, slow, many; and how the server leaves."""

import gc
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from tests.web.clients import Web, http_client, initialize, served

DROPPED, DROPPED_WHOLE = 1_000, 10_000


async def hung_up(stream: SocketStream) -> bytes:
    """What the server says until it closes the connection."""
    said = bytearray()
    try:
        while True:
            said += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return bytes(said)


async def is_well(web: Web) -> bool:
    return (await web.post({}, initialize())).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /mcp HT",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    ],
)
async def test_a_peer_that_does_not_finish_its_request_is_hung_up_on(
    data_root: Path, sent: bytes
) -> None:
    async with served(data_root, anonymous=True, request_time=0.3) as web:
        async with web.peer() as (stream, _):
            if sent:
                await stream.send(sent)
            said = await hung_up(stream)
        assert said.endswith(b"ok\n") or said == b""
        assert await is_well(web)


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x80" * 500,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5_000,
        b"GET /" + b"x" * 20_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"\0" * 1000 + b"\r\n\r\n",
    ],
    ids=[
        "tls",
        "long-value",
        "many",
        "long-path",
        "hosts",
        "negative",
        "lengths",
        "fold",
        "encoded",
        "nul",
    ],
)
async def test_what_is_no_http_is_refused(data_root: Path, head: bytes) -> None:
    async with served(data_root, anonymous=True) as web:
        async with web.peer() as (stream, _):
            await stream.send(head)
            said = await hung_up(stream)
        assert b" 200 " not in said
        assert await is_well(web)


async def test_silent_peers_make_room_for_others(data_root: Path) -> None:
    async with served(data_root, anonymous=True, connections=4) as web:
        async with web.peer() as (first, _):
            with ExitStack() as stack:
                for _ in range(50):
                    peer = socket.create_connection(("127.0.0.1", web.port))
                    stack.callback(peer.close)
                assert await hung_up(first) == b""
                assert await is_well(web)


async def test_calls_are_not_dropped_for_newer_peers(data_root: Path) -> None:
    answers: list[int] = []
    async with served(data_root, anonymous=True, connections=2) as web:

        async def long_call() -> None:
            async with web.client("auto", {"Mcp-Sandbox-Chat": "work"}) as client:
                result = await client.call_tool("exec", {"command": "x"})
                answers.append(len(result.content))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long_call)
            await web.computers.begun.wait()
            with ExitStack() as stack:
                for _ in range(30):
                    peer = socket.create_connection(("127.0.0.1", web.port))
                    stack.callback(peer.close)
                while not await is_well(web):
                    pass
            web.computers.release.set()
    assert answers == [1]


@pytest.mark.slow
async def test_many_connections_opened_and_dropped_leave_nothing(
    data_root: Path, request: pytest.FixtureRequest
) -> None:
    dropped = DROPPED_WHOLE if request.config.getoption("--whole") else DROPPED
    async with served(data_root, anonymous=True, connections=64) as web:
        assert await is_well(web)
        before = open_files()

        def connect_and_drop() -> None:
            for number in range(dropped):
                with socket.create_connection(("127.0.0.1", web.port)) as peer:
                    if number % 3 == 0:
                        peer.sendall(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\n")

        await anyio.to_thread.run_sync(connect_and_drop)
        while open_files() > before + 2:
            gc.collect()
            await anyio.sleep(0.01)
        assert await is_well(web)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_the_end_does_not_wait_for_peers_that_do_nothing(data_root: Path) -> None:
    async with served(data_root, anonymous=True) as web:
        silent = await anyio.connect_tcp("127.0.0.1", web.port)
        kept = http_client()
        assert (await kept.get(f"{web.origin}/health")).status_code == 200
        started = anyio.current_time()
    assert anyio.current_time() - started < 5
    assert await hung_up(silent) == b""
    await silent.aclose()
    await kept.aclose()


async def test_a_peer_that_does_not_read_cannot_keep_the_server_from_ending(
    data_root: Path,
) -> None:
    async with served(data_root, anonymous=True) as web:
        peer = socket.create_connection(("127.0.0.1", web.port))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{web.port}\r\n\r\n".encode()
        await anyio.to_thread.run_sync(peer.sendall, request * 20_000)
        started = anyio.current_time()
    assert anyio.current_time() - started < 8
    peer.close()
