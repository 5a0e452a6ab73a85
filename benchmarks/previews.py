"""What is served in a sandbox, through its preview."""

import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from urllib.parse import urlsplit

import anyio

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, Failed, configured, open_sandbox
from mcp_sandbox.app.chats import open_session, temporary_data
from mcp_sandbox.runtime.files import Files

_SIZE = 100_000_000
_PORT = 8000
_PAGE = "page.html"
_FILL = f"head -c {_SIZE} /dev/urandom > large.bin"
_SERVE = "-m http.server --bind 127.0.0.1"


@asynccontextmanager
async def _inside() -> AsyncGenerator[str]:
    """The address of a preview of a server in a sandbox."""
    async with temporary_data() as folder:
        config = await configured(folder, "docker")
        async with open_session(CHAT.chat, config=config) as session:
            await session.exec(f"echo page > {_PAGE}; {_FILL}")
            await session.exec(f"python3 {_SERVE} {_PORT} >/dev/null 2>&1 &")
            yield await session.previews.open(_PORT)


@asynccontextmanager
async def _on_host() -> AsyncGenerator[str]:
    """The address of the same server on this machine."""
    async with temporary_data() as folder:
        await anyio.Path(folder, _PAGE).write_text("page\n")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        command = [sys.executable, *_SERVE.split(), str(port)]
        async with await anyio.open_process(
            command, cwd=Path(folder), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        ) as server:
            try:
                await _answers(port)
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()


async def _answers(port: int) -> None:
    with anyio.fail_after(10):
        while True:
            try:
                async with await anyio.connect_tcp("127.0.0.1", port):
                    return
            except OSError:
                await anyio.sleep(0.02)


async def _get(url: str, path: str, least: int) -> None:
    """One request on a connection of its own."""
    parts, size = urlsplit(url), 0
    async with await anyio.connect_tcp("127.0.0.1", parts.port or 0) as stream:
        await stream.send(f"GET /{path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
        async for data in stream:
            size += len(data)
    if size < least:
        raise Failed(f"only {size} bytes came from {url}")


async def _read(files: Files) -> None:
    if len(await files.read("/workspace/large.bin")) != _SIZE:
        raise Failed("the runtime brought back another size")


async def _request(pairs: int) -> Measured:
    async with _inside() as ours, _on_host() as theirs:
        get = partial(_get, path=_PAGE, least=100)
        return await times_slower(clocked(partial(get, ours)), clocked(partial(get, theirs)), pairs)


async def _transfer(pairs: int) -> Measured:
    async with _inside() as url, open_sandbox("docker") as sandbox:
        await sandbox.runtime.exec(_FILL)
        ours = partial(_get, url, "large.bin", _SIZE)
        theirs = partial(_read, sandbox.runtime.files)
        return await times_slower(clocked(ours), clocked(theirs), pairs)


ROWS = (
    Row(
        "preview",
        "a request through a preview, on a new connection, docker",
        "the same server on the host",
        Goal(4),
        _request,
        pairs=200,
    ),
    Row(
        "preview-transfer",
        "100 MB through a preview, docker",
        "read a file of as much through the runtime",
        Goal(2),
        _transfer,
    ),
)
