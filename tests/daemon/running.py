"""A real daemon in a process of its own, and a client that speaks raw lines to it."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from anyio.abc import ByteReceiveStream, ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.backends import local_socket
from tests import forked

ROOT = Path(__file__).parents[2]
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "1"},
}


@dataclass(frozen=True)
class Place:
    """Where one daemon keeps everything. `beside`: whose namespaces it runs in; `module`: what."""

    home: Path
    socket: Path
    data: Path
    backend: str = "unsafe-local"
    more: Mapping[str, str] = field(default_factory=dict[str, str])
    beside: int = 0
    module: str = "mcp_sandbox"

    def command(self, name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "mcp_sandbox", *self.arguments(name, *arguments)]

    def arguments(self, name: str, *more: str) -> list[str]:
        """`name` may be a group and a command of it."""
        return [*name.split(), "--socket", str(self.socket), *more]

    def environment(self) -> dict[str, str]:
        names = ("PATH", "DOCKER_HOST", "MCP_SANDBOX_DOCKER__IMAGE")
        known = {name: os.environ[name] for name in names if name in os.environ}
        # What a killed daemon leaves ends itself soon.
        ends = {"MCP_SANDBOX_SESSIONS__ORPHANED": "2s"}
        # Where no wall is, a person would be asked about most of what tests do.
        runs = {"MCP_SANDBOX_POLICY__PROFILE": "off"}
        return {
            **known,
            **ends,
            **runs,
            **self.more,
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
        }


class Done(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str


def place(
    tmp_path: Path, backend: str = "unsafe-local", more: Mapping[str, str] | None = None
) -> Place:
    return Place(tmp_path, tmp_path / "s" / "mcp.sock", tmp_path / "data", backend, more or {})


class Daemon:
    """A `serve` process."""

    def __init__(self, process: forked.Program, place: Place) -> None:
        self.process = process
        self.place = place
        self._stderr = BufferedByteReceiveStream(process.stderr)
        self.log = ""

    async def noted(self, text: str) -> None:
        """Wait until the daemon has logged this."""
        while text not in self.log:
            self.log += (await self._stderr.receive()).decode()

    async def keep_log(self) -> None:
        """Read what the daemon logs, until it has ended: who logs much waits for its reader."""
        try:
            while True:
                self.log += (await self._stderr.receive()).decode()
        except anyio.EndOfStream:
            return

    async def end(self) -> int:
        """The exit code, once it has ended; `log` is complete then."""
        await self.keep_log()
        return await self.process.wait()


@asynccontextmanager
async def starting(place: Place, *options: str) -> AsyncGenerator[Daemon]:
    """A daemon that was started, and may not listen yet; it is killed at the end."""
    arguments = ("--data", str(place.data), "--backend", place.backend, *options)
    async with forked.start(
        place.arguments("serve", *arguments),
        env=place.environment(),
        cwd="/",
        beside=place.beside,
        module=place.module,
    ) as process:
        try:
            yield Daemon(process, place)
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def running(place: Place, *options: str, limit_s: float = 50) -> AsyncGenerator[Daemon]:
    """A daemon that listens; asked to end at the end, which it must do well."""
    with anyio.fail_after(limit_s):
        async with starting(place, *options) as daemon:
            await listening(place)
            yield daemon
            if daemon.process.returncode is None:
                daemon.process.terminate()
                assert await daemon.end() == 0, daemon.log


async def listening(place: Place) -> None:
    """Wait until a daemon accepts; a killed one leaves a socket that nobody listens on."""
    while True:
        try:
            async with await anyio.connect_unix(place.socket):
                return
        except (FileNotFoundError, ConnectionRefusedError):
            await anyio.sleep(0.01)


class Client:
    """Sends lines, reads lines."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._lines = BufferedByteReceiveStream(stream)
        self._last_id = 0

    async def send(self, message: object) -> None:
        await self.stream.send(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Any:
        return json.loads(await self._lines.receive_until(b"\n", 10_000_000))

    async def hung_up(self) -> bytes:
        """What still comes until the daemon closes its side."""
        rest = bytearray()
        try:
            while True:
                rest += await self._lines.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return bytes(rest)

    async def greet(self, **more: object) -> Any:
        await self.send({"mcp-sandbox": 1, "version": "0", **more})
        return await self.receive()

    async def initialize(self) -> None:
        assert "result" in await self.answer(await self.request("initialize", INITIALIZE))
        await self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def request(self, method: str, params: object) -> int:
        self._last_id += 1
        await self.send({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params})
        return self._last_id

    async def answer(self, number: int) -> Any:
        while True:
            message = await self.receive()
            if message.get("id") == number:
                return message

    async def call(self, tool: str, **arguments: object) -> Any:
        number = await self.request("tools/call", {"name": tool, "arguments": arguments})
        return (await self.answer(number))["result"]

    async def exec(self, command: str) -> str:
        text: str = (await self.call("exec", command=command))["content"][0]["text"]
        return text


@asynccontextmanager
async def dialled(place: Place) -> AsyncGenerator[Client]:
    async with await local_socket.dial(str(place.socket)) as stream:
        yield Client(stream)


@asynccontextmanager
async def in_chat(place: Place, chat: str, **more: object) -> AsyncGenerator[Client]:
    """A client that works in a chat already."""
    async with dialled(place) as client:
        answer = await client.greet(role="chat", chat=chat, **more)
        assert answer["ok"], answer
        await client.initialize()
        yield client


async def command(
    place: Place, name: str, *arguments: str, stdin: bytes = b"", asks: bool = True
) -> Done:
    """Run a command line as a person would; one that `asks` the daemon, or works without it."""
    given = place.arguments(name, *arguments) if asks else [*name.split(), *arguments]
    return await ended(given, env=place.environment(), stdin=stdin, beside=place.beside)


async def ended(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str = "/",
    stdin: bytes = b"",
    beside: int = 0,
    module: str = "mcp_sandbox",
) -> Done:
    """How a command line of ours ended, or another program of Python."""
    said = {"stdout": bytearray(), "stderr": bytearray()}
    with anyio.fail_after(50):
        async with forked.start(
            arguments, env=env, cwd=cwd, stdin=stdin, beside=beside, module=module
        ) as program:
            async with anyio.create_task_group() as tasks:

                async def read(name: str, pipe: ByteReceiveStream) -> None:
                    async for data in pipe:
                        said[name] += data

                tasks.start_soon(read, "stdout", program.stdout)
                tasks.start_soon(read, "stderr", program.stderr)
            code = await program.wait()
    return Done(code, said["stdout"].decode(), said["stderr"].decode())


async def control(place: Place, command: str, **arguments: object) -> Any:
    """What the daemon answers to a command."""
    async with dialled(place) as client:
        assert (await client.greet(role="control", command=command, arguments=arguments))["ok"]
        return await client.receive()
