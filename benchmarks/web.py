"""A tool call over HTTP: through `mcp-sandbox serve --http`, and through a server of the SDK."""

import re
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from subprocess import DEVNULL, PIPE

import anyio
import httpx2
from anyio import to_thread
from anyio.abc import ByteReceiveStream
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.client import call
from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, Failed, open_place
from mcp_sandbox.config import Config, search_path, server_variables
from mcp_sandbox.web.tokens import TokenFile

# What is measured is one call after another, as quickly as it goes.
_NO_RATE = {"MCP_SANDBOX_HTTP__RATE": "1000000"}


@asynccontextmanager
async def _server(
    command: Sequence[str], announces: str, env: Mapping[str, str]
) -> AsyncGenerator[str]:
    """Start a server, and give the part of its log that the pattern names first."""
    async with await anyio.open_process(
        [sys.executable, "-m", *command], stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=env
    ) as process:
        assert process.stderr
        try:
            with anyio.fail_after(30):
                found = await _announced(process.stderr, re.compile(announces))
            async with anyio.create_task_group() as tasks:
                # A log that is not read would stop the server when the pipe is full.
                tasks.start_soon(_read_on, process.stderr)
                yield found
                tasks.cancel_scope.cancel()
        finally:
            process.terminate()


async def _announced(log: ByteReceiveStream, pattern: re.Pattern[str]) -> str:
    text = ""
    while (found := pattern.search(text)) is None:
        try:
            text += (await log.receive()).decode()
        except anyio.EndOfStream as exc:
            raise Failed(f"the server ended: {text[-500:]}") from exc
    return found[1]


async def _read_on(log: ByteReceiveStream) -> None:
    async for _ in log:
        pass


@asynccontextmanager
async def _ours(config: Config) -> AsyncGenerator[Client]:
    """The SDK's client of a daemon on this data root."""
    place = ["--data", str(config.data_dir), "--socket", str(config.data_dir / "s" / "mcp.sock")]
    options = ["--http", "127.0.0.1:0", "--backend", config.backend, *place]
    _, secret = await to_thread.run_sync(TokenFile(config.data_dir).add, CHAT.user)
    headers = {"Authorization": f"Bearer {secret}", "Mcp-Sandbox-Chat": CHAT.chat}
    env = {**server_variables(), **_NO_RATE, "PATH": search_path()}
    command = ["mcp_sandbox", "serve", *options]
    async with (
        _server(command, r"MCP over HTTP at (\S+)\s", env) as url,
        _client(url, headers) as client,
    ):
        yield client


@asynccontextmanager
async def _theirs() -> AsyncGenerator[Client]:
    """The SDK's client of the SDK's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = ["benchmarks.noop_server", str(port)]
    async with (
        _server(command, r"running on (\S+)", server_variables()) as url,
        _client(f"{url}/mcp", {}) as client,
    ):
        yield client


@asynccontextmanager
async def _client(url: str, headers: Mapping[str, str]) -> AsyncGenerator[Client]:
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def _exec_against_noop(pairs: int) -> Measured:
    async with open_place("docker") as place, _ours(place.config) as client, _theirs() as other:
        ours = partial(call, client, "exec", command="true")
        theirs = partial(call, other, "noop", command="true")
        return await times_slower(clocked(ours), clocked(theirs), pairs)


ROWS = (
    Row(
        "http",
        "MCP client over HTTP: tool exec, command true, docker",
        "MCP client over HTTP: a tool of the SDK's server that does nothing",
        Goal(2),
        _exec_against_noop,
        pairs=200,
    ),
)
