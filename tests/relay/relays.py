"""Real relays, and servers for them to reach: a scripted daemon, or a bare socket of the test."""

import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.stapled import StapledByteStream

from mcp_sandbox import __version__
from tests import forked
from tests.daemon.running import ROOT, Client, Place

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class Relay(Client):
    """A relay's process, spoken to as a client does: of the newer era unless it initializes."""

    def __init__(self, process: Process) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        super().__init__(StapledByteStream(process.stdin, process.stdout))
        self.process = process
        self._stderr = BufferedByteReceiveStream(process.stderr)
        self._always: dict[str, object] = {"_meta": META}

    async def initialize(self) -> None:
        self._always = {}
        await super().initialize()

    async def start_call(self, command: str, **more: object) -> int:
        arguments = {"command": command, **more}
        return await self.request(
            "tools/call", {"name": "exec", "arguments": arguments, **self._always}
        )

    async def said(self, text: str) -> str:
        """What stands on stderr until this text has come."""
        seen = ""
        while text not in seen:
            seen += (await self._stderr.receive()).decode()
        return seen

    async def close_input(self) -> None:
        assert self.process.stdin
        await self.process.stdin.aclose()

    async def ended(self) -> tuple[list[Any], int]:
        """What else it writes until its end, and its exit code."""
        rest = await self.hung_up()
        return [json.loads(line) for line in rest.splitlines()], await self.process.wait()


def environment(place: Place, **more: str) -> dict[str, str]:
    """What a relay sees; the daemon that it starts gets its settings by this."""
    settings = {"BACKEND": place.backend, "DATA_DIR": str(place.data)}
    ours = {f"MCP_SANDBOX_{name}": value for name, value in settings.items()}
    return {**place.environment(), **ours, **more}


@asynccontextmanager
async def relayed(place: Place, *options: str, **more: str) -> AsyncGenerator[Relay]:
    """A relay that was started; it is killed at the end."""
    with anyio.fail_after(50):
        async with await anyio.open_process(
            place.command("connect", *options),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(place, **more),
            cwd=place.home,
        ) as process:
            try:
                yield Relay(process)
            finally:
                if process.returncode is None:
                    process.kill()


class Scripted:
    """A process of program.py."""

    def __init__(self, process: forked.Program) -> None:
        self.process = process
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def noted(self, key: str) -> Any:
        """Wait until something of that kind happened; returns what."""
        while True:
            event = json.loads(await self._stdout.receive_until(b"\n", 100_000))
            if key in event:
                return event[key]

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def scripted(
    place: Place, version: str = __version__, *manner: str
) -> AsyncGenerator[Scripted]:
    """A scripted daemon that listens; a stale socket is replaced."""
    place.socket.parent.mkdir(mode=0o700, exist_ok=True)
    place.socket.unlink(missing_ok=True)
    async with forked.start(
        [str(place.socket), version, *manner],
        env=os.environ,
        cwd=str(ROOT),
        module="tests.relay.program",
    ) as process:
        daemon = Scripted(process)
        try:
            await daemon.noted("listening")
            yield daemon
        finally:
            if process.returncode is None:
                process.kill()


@contextmanager
def bare_server(place: Place) -> Generator[socket.socket]:
    """A socket that listens; what it says is up to the test, in threads."""
    place.socket.parent.mkdir(mode=0o700, exist_ok=True)
    place.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place.socket))
        server.listen()
        server.settimeout(20)
        yield server


def accepted(server: socket.socket) -> socket.socket:
    """The next client, greeted. Blocks."""
    connection, _ = server.accept()
    connection.settimeout(20)
    line_from(connection)
    answer = {"ok": True, "version": __version__, "pid": 1, "chat": "local/c"}
    connection.sendall(json.dumps(answer).encode() + b"\n")
    return connection


def line_from(connection: socket.socket) -> bytes:
    """The next line. Blocks."""
    line = bytearray()
    while not line.endswith(b"\n"):
        seen = connection.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            raise EOFError(bytes(line))
        line += connection.recv(seen.find(b"\n") + 1 or len(seen))
    return bytes(line)
