"""Agents inside: whole runs, calls of host tools, doors and output, beside the same outside."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import ByteStream, SocketAttribute

from benchmarks.measure import Goal, Measured, Row, Side, clocked, times_faster, times_slower
from benchmarks.places import CHAT, Failed, configured, in_thread, open_sandbox
from mcp_sandbox.agents.executors.base import ModelAccess, Run
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.agents.messages import read_conversation
from mcp_sandbox.app.agents import open_agent
from mcp_sandbox.app.chats import open_manager, temporary_data
from mcp_sandbox.config import AgentsConfig, BridgeConfig, ConnectorConfig
from mcp_sandbox.models import RELAY, BackendName
from mcp_sandbox.server.bridge import open_bridge
from mcp_sandbox.sessions.session import Session
from tests.e2e.messages_api import Script, serving

_CACHE = Path(".pytest_cache/d/npm")
_ASKED = [{"role": "user", "content": "Say it."}]
# The host has no wall around it: there the program asks before it runs what is not named.
_ARGUMENTS = {"permission_mode": "acceptEdits", "allowed_tools": ["Bash"]}
_KEY = "key-of-the-benchmark"
# Fewer than the bridge lets pass in a second.
_CALLS = 18
_CONNECTIONS = 300
_SIZE, _PIECE = 100_000_000, 262_144

# Prints how many seconds a tool of the host takes to answer, on average, after the first answer.
_CALL = f"""
import json, subprocess, sys, time
with subprocess.Popen(
    ["python3", "-I", "-S", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
) as relay:
    def ask(number, method, **params):
        line = {{"jsonrpc": "2.0", "id": number, "method": method, "params": params}}
        relay.stdin.write(json.dumps(line).encode() + b"\\n")
        relay.stdin.flush()
        answer = json.loads(relay.stdout.readline())
        assert answer["id"] == number and "result" in answer, answer
    who = {{"name": "benchmark", "version": "1"}}
    ask(0, "initialize", protocolVersion="2025-06-18", capabilities={{}}, clientInfo=who)
    ask(1, "tools/list")
    began = time.perf_counter()
    for number in range({_CALLS}):
        ask(number + 2, "tools/call", name="nothing", arguments={{}})
    print((time.perf_counter() - began) / {_CALLS})
    relay.stdin.close()
"""
# Both print how many seconds it took: to send and to get the bytes, and to be answered so often.
_PASS = f"""
import socket, sys, time
piece, left = bytes({_PIECE}), {_SIZE}
began = time.perf_counter()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as door:
    while left > 0:
        door.sendall(piece[:left])
        left -= len(piece)
    door.shutdown(socket.SHUT_WR)
    size = 0
    while data := door.recv({_PIECE}):
        size += len(data)
assert size == {_SIZE}, size
print(time.perf_counter() - began)
"""
_CONNECT = f"""
import socket, sys, time
began = time.perf_counter()
for _ in range({_CONNECTIONS}):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as door:
        door.sendall(b"x")
        assert door.recv(1) == b"x"
print(time.perf_counter() - began)
"""


@asynccontextmanager
async def _session() -> AsyncGenerator[Session]:
    async with (
        temporary_data() as folder,
        open_manager(await configured(folder, "docker")) as manager,
    ):
        yield await manager.session(CHAT)


async def _inside(session: Session, script: str, *words: object) -> float:
    """The seconds that a script prints in the sandbox."""
    result = await session.exec(["python3", "-c", script, *map(str, words)], timeout_s=55)
    if not result.success:
        raise Failed(f"a script inside ended with {result.exit_code}: {result.stderr}")
    return float(result.stdout)


async def _outside(script: str, *words: object) -> float:
    """The same on the host."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return float((await anyio.run_process(command, stderr=None)).stdout)


def _programs() -> Path:
    """The folder whose bin has the Claude command line."""
    found = [*_CACHE.glob("claude/node_modules/@anthropic-ai/claude-code-linux-*/claude")]
    if not found:
        raise Failed(
            "the Claude command line is not installed: "
            'MCP_SANDBOX_REQUIRE=claude make test ARGS="-m claude" does it'
        )
    folder = (_CACHE / "claude" / "agents").resolve()
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    if not (folder / "bin" / "claude").exists():
        (folder / "bin" / "claude").hardlink_to(found[0])
    return folder


@asynccontextmanager
async def _agents(name: BackendName, runtime: str) -> AsyncGenerator[tuple[Side, Side]]:
    """A run in a sandbox, and the same program with the same request on the host."""
    script = Script((("Bash", {"command": "echo done"}),), "Done.")
    programs = await in_thread(_programs)
    async with temporary_data() as folder:
        key, home = folder / "key", folder / "home"
        await in_thread(partial(key.write_text, _KEY))
        await in_thread(partial(key.chmod, 0o600))
        await in_thread(home.mkdir)
        config = await configured(folder / "data", name)
        with serving(script) as url:
            changes = {
                "docker": config.docker.model_copy(update={"runtime": runtime}),
                "agents": AgentsConfig(programs=programs),
                "connectors": {"scripted": ConnectorConfig(url=url, key=f"file:{key}")},
            }
            config = config.model_copy(update=changes)
            async with open_agent(arguments=_ARGUMENTS, config=config) as agent:

                async def ours() -> None:
                    last = await agent.execute(_ASKED)
                    if last.is_error or last.content != script.last_words:
                        raise Failed(f"the agent inside said {last}")

                run = Run("/tmp", read_conversation(_ASKED), ModelAccess(url, _KEY))
                yield clocked(ours), clocked(partial(_on_host, run, programs, home))


async def _on_host(run: Run, programs: Path, home: Path) -> None:
    program = Claude.read(_ARGUMENTS, "the arguments").command(run)
    path = f"{programs / 'bin'}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *program.argv,
        stdin=PIPE,
        stdout=PIPE,
        cwd=home,
        env={**program.env, "HOME": str(home), "PATH": path},
    )
    said, _ = await process.communicate(program.stdin)
    if process.returncode or b'"result":"Done."' not in said:
        raise Failed(f"the agent on the host ended with {process.returncode}: {said[-500:]!r}")


async def _runs(pairs: int, name: BackendName, runtime: str = "") -> Measured:
    async with _agents(name, runtime) as (ours, theirs):
        return await times_slower(ours, theirs, pairs)


def nothing() -> str:
    """Does nothing."""
    return ""


async def _calls(values: int) -> Measured:
    """In ms a call: the tool itself takes none."""

    async def tell(_events: object) -> None:
        return

    taken = list[float]()
    async with _session() as session:
        for _ in range(values):
            opening = open_bridge(BridgeConfig(), {}, [nothing], of="benchmark", tell=tell)
            async with opening as bridge, session.door(bridge.handle, at="/tmp/tools") as place:
                taken.append(await _inside(session, _CALL, RELAY, place))
    return Measured(tuple(each * 1000 for each in taken), tuple(taken))


async def _answer(stream: ByteStream) -> None:
    """Send as much as has come: at once for one byte, else when all of it is there."""
    async with stream:
        size = 0
        async for data in stream:
            size += len(data)
            if size == 1:
                await stream.send(data)
        for _ in range(size // _PIECE):
            await stream.send(bytes(_PIECE))
        if size > 1:
            await stream.send(bytes(size % _PIECE))


async def _through_a_door(values: int, script: str) -> tuple[list[float], list[float]]:
    """What a script takes through a door, and what it takes on the host, in turns."""
    ours, theirs = list[float](), list[float]()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, _answer)
        async with _session() as session, session.door(_answer) as port:
            await _inside(session, script, port)
            for _ in range(values):
                ours.append(await _inside(session, script, port))
                theirs.append(await _outside(script, listener.extra(SocketAttribute.local_port)))
        tasks.cancel_scope.cancel()
    return ours, theirs


async def _bytes(values: int) -> Measured:
    """In MB/s, there and back."""
    ours, theirs = await _through_a_door(values, _PASS)
    return Measured(tuple(2 * _SIZE / 1e6 / each for each in ours), tuple(ours), tuple(theirs))


async def _connections(values: int) -> Measured:
    """In ms a connection."""
    ours, theirs = await _through_a_door(values, _CONNECT)
    each_ms = tuple(each * 1000 / _CONNECTIONS for each in ours)
    return Measured(each_ms, tuple(ours), tuple(theirs))


async def _output(pairs: int) -> Measured:
    """Output that is taken whole."""
    async with open_sandbox("docker") as sandbox:
        await sandbox.runtime.exec(f"head -c {_SIZE} /dev/urandom > large.bin")

        async def ours() -> None:
            size = 0

            async def take(data: bytes) -> None:
                nonlocal size
                size += len(data)

            await sandbox.runtime.exec(["cat", "large.bin"], take=take)
            _whole(size)

        async def theirs() -> None:
            command = ["docker", "exec", sandbox.id, "cat", "/workspace/large.bin"]
            async with await anyio.open_process(command, stderr=None) as process:
                assert process.stdout
                _whole(sum([len(data) async for data in process.stdout]))

        return await times_faster(clocked(ours), clocked(theirs), pairs)


def _whole(size: int) -> None:
    if size != _SIZE:
        raise Failed(f"{size:,} bytes came instead of {_SIZE:,}")


def _run_row(name: str, place: str, limit: float, backend: BackendName, runtime: str = "") -> Row:
    return Row(
        f"run-{name}",
        f"the Claude command line asks a model, runs a command and ends, {place}",
        "the same program on the host",
        Goal(limit),
        partial(_runs, name=backend, runtime=runtime),
        pairs=10,
    )


ROWS = (
    _run_row("bubblewrap", "bubblewrap", 1.2, "bubblewrap"),
    _run_row("docker", "docker", 1.3, "docker"),
    _run_row("gvisor", "gVisor", 3, "docker", "runsc"),
    Row(
        "bridge-call",
        "a tool of the host that does nothing is called through relay and door, docker",
        "-",
        Goal(5, "ms"),
        _calls,
        pairs=5,
        calls=1,
    ),
    Row(
        "door-bytes",
        "200 MB through a door, half of it each way, docker",
        "to the same handler on the host",
        Goal(40, "MB/s", at_least=True),
        _bytes,
        pairs=5,
    ),
    Row(
        "door-connections",
        "a connection to a door, and an answer, docker",
        "to the same handler on the host",
        Goal(3, "ms"),
        _connections,
        pairs=5,
        calls=_CONNECTIONS,
    ),
    Row(
        "whole-output",
        "100 MB of output that is taken whole, docker",
        "docker exec cat",
        Goal(1, at_least=True),
        _output,
        pairs=7,
    ),
)
