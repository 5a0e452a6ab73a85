"""A server that may have few open files: chats that hold many connections take none from others."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
import anyio.abc
import pytest

from tests.daemon.running import Place, in_chat, listening, place

pytestmark = pytest.mark.timeout(120)
MOST_FILES, CHATS = 1024, 8
HOLD = """
import socket, time
kept = []
try:
    while len(kept) < 200:
        line = socket.create_connection(("127.0.0.1", 17329), 5)
        kept.append(line)
        line.sendall(b"CONNECT host.internal:%(port)d HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        line.settimeout(5)
        if b" 200 " not in line.recv(4096):
            break
except OSError:
    pass
print(len(kept) > 20, flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def a_service() -> AsyncGenerator[tuple[int, list[anyio.abc.SocketStream]]]:
    """A server that keeps what connects to it, and answers who says something."""
    kept = list[anyio.abc.SocketStream]()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            kept.append(stream)
            try:
                await stream.receive()
                await stream.send(b"HTTP/1.0 200 OK\r\n\r\nhere")
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            yield listener.extra(anyio.abc.SocketAttribute.local_port), kept
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving(where: Place) -> AsyncGenerator[anyio.abc.Process]:
    given = ("serve", "--data", str(where.data), "--backend", where.backend)
    command = [sys.executable, "-m", "mcp_sandbox", *where.arguments(*given)]
    limited = ["prlimit", f"--nofile={MOST_FILES}:{MOST_FILES}", *command]
    process = await anyio.open_process(
        limited, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=where.environment(), cwd="/"
    )
    try:
        await listening(where)
        yield process
        process.terminate()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


async def test_idle_connections_of_eight_chats_leave_all_others_theirs(tmp_path: Path) -> None:
    log = bytearray()

    async def read_log(stream: anyio.abc.ByteReceiveStream | None) -> None:
        assert stream
        async for piece in stream:
            log.extend(piece)

    with anyio.fail_after(110):
        async with a_service() as (port, kept), anyio.create_task_group() as tasks:
            private = {"host": "host.internal", "port": port, "private": True}
            more = {
                "MCP_SANDBOX_NETWORK": "allowlist",
                "MCP_SANDBOX_EGRESS__ALLOW": json.dumps([private]),
                "MCP_SANDBOX_SESSIONS__MAX_PER_USER": "9",
            }
            where = place(tmp_path, "bubblewrap", more)
            async with serving(where) as process, AsyncExitStack() as stack:
                tasks.start_soon(read_log, process.stderr)
                for number in range(CHATS):
                    client = await stack.enter_async_context(in_chat(where, f"idle-{number}"))
                    stack.push_async_callback(client.call, "sandbox_reset")
                    code = HOLD % {"port": port}
                    held = await client.call("run_code", code=code, language="python", wait_s=2)
                    assert "True" in held["content"][0]["text"]
                # A chat may have an eighth of them, and a user half of all.
                assert len(kept) >= 100
                client = await stack.enter_async_context(in_chat(where, "other"))
                fetch = f"curl -sS --proxytunnel http://host.internal:{port}/"
                said = await client.call("exec", command=f"{fetch} && echo more > f && cat f")
                assert said["content"][0]["text"].startswith("heremore")
                said = await client.call("read_file", path="f")
                assert "more" in said["content"][0]["text"]
    assert b"Too many open files" not in log, log.decode()
