"""How soon a client that starts the relay has its first answer, with a daemon that runs already."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from mcp import StdioServerParameters

from benchmarks.client import NOOP
from benchmarks.measure import Goal, Measured, Row, Side, clocked, times_slower
from benchmarks.places import Failed, in_thread
from mcp_sandbox.app.chats import temporary_data
from mcp_sandbox.models import BackendName

_PROGRAM = str(Path(sys.executable).with_name("mcp-sandbox"))
_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "benchmark", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
_LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": _META}}


@asynccontextmanager
async def relay_to_daemon(backend: BackendName) -> AsyncGenerator[StdioServerParameters]:
    """How to start a relay before a daemon of this block's own."""
    async with temporary_data() as folder:
        socket = folder / "s" / "mcp.sock"
        where = ["--socket", str(socket)]
        async with await anyio.open_process(
            [_PROGRAM, "serve", *where, "--data", str(folder), "--backend", backend],
            stdout=None,
            stderr=None,
        ) as daemon:
            while not socket.exists():  # noqa: ASYNC110  another process makes it
                await anyio.sleep(0.01)
            try:
                yield StdioServerParameters(command=_PROGRAM, args=["connect", *where])
            finally:
                daemon.terminate()


def _started(server: StdioServerParameters) -> Side:
    return partial(in_thread, partial(_first_answer, (server.command, *server.args)))


def _first_answer(command: Sequence[str]) -> float:
    """Seconds from the start of a stdio server to its list of tools. Blocks."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdin is None or process.stdout is None:
            raise Failed("no pipes")
        process.stdin.write(json.dumps(_LIST).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        taken = time.perf_counter() - started
        process.stdin.close()
        process.stdout.read()
    if '"tools"' not in answer.decode():
        raise Failed(f"{command[0]} answered {answer[:200]!r}")
    return taken


def _bare_interpreter() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


async def _against_interpreter(pairs: int) -> Measured:
    async with relay_to_daemon("unsafe-local") as relay:
        bare = clocked(partial(in_thread, _bare_interpreter))
        return await times_slower(_started(relay), bare, pairs)


async def _against_sdk(pairs: int) -> Measured:
    async with relay_to_daemon("unsafe-local") as relay:
        return await times_slower(_started(relay), _started(NOOP), pairs)


ROWS = (
    Row(
        "relay",
        "mcp-sandbox connect: start to the first tools/list, daemon running",
        "python -c pass",
        Goal(3),
        _against_interpreter,
        pairs=100,
    ),
    Row(
        "relay-sdk",
        "mcp-sandbox connect: start to the first tools/list, daemon running",
        "SDK server with one tool: start to the first tools/list",
        Goal(0.1),
        _against_sdk,
    ),
)
