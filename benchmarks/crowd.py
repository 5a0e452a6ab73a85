"""Many chats through one daemon: how they hinder each other, and what they cost it in memory."""

import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL

import anyio
from mcp import Client, StdioServerParameters

from benchmarks.client import call
from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import in_thread, open_place
from mcp_sandbox.config import Config, search_path, server_variables
from mcp_sandbox.models import BackendName
from mcp_sandbox.server.errors import sole_error

_PROGRAM = str(Path(sys.executable).with_name("mcp-sandbox"))
_AT_ONCE = 32
_CALLS = 10
_CHATS = 200
_USERS = 5
_QUARTER = _CHATS // 4
# An hour in two minutes, so the times that a sandbox may stay idle are as much shorter.
_HOUR_S = 120.0
_COMPRESSED = {"IDLE": "30s", "REMOVE_AFTER": "120s", "LIFETIME": "48m"}
_HUNDRED = 100
# What another chat does: its own processor time is limited, and this goes through the daemon.
_ATTACKS = {
    "output": "while True: print('x' * 8191)",
    "short-lines": "import os\nwhile True: os.write(1, b'\\n')",
    "processes": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "files": "for n in range(10**6): open(f'f{n}', 'w').close()",
}
_FLOOD = """
import socket
while True:
    line = socket.create_connection(("127.0.0.1", 17329))
    line.sendall(b"GET http://a.example/ HTTP/1.1\\r\\nHost: a.example\\r\\n\\r\\n")
    line.recv(65536)
    line.close()
"""
_ROOM = {"MAX_OPEN": f"{_AT_ONCE}", "MAX_PER_USER": f"{_AT_ONCE}"}


@dataclass(frozen=True)
class _Daemon:
    """A daemon on an empty data root, reached as clients reach it."""

    config: Config
    process: int

    @asynccontextmanager
    async def chat(self, user: str, name: str) -> AsyncGenerator[Client]:
        """The SDK's client of a relay of its own."""
        arguments = ["connect", "--no-start", "--user", user, "--chat", name]
        arguments += ["--socket", str(_socket(self.config))]
        relay = StdioServerParameters(
            command=_PROGRAM, args=arguments, env=dict(server_variables())
        )
        async with Client(relay) as client:
            yield client

    async def resident_mb(self) -> float:
        """The memory that it has now."""
        lines = await in_thread(Path(f"/proc/{self.process}/status").read_text)
        return next(int(n.split()[1]) for n in lines.splitlines() if n.startswith("VmRSS")) / 1024


def _socket(config: Config) -> Path:
    return config.data_dir / "s" / "mcp.sock"


@asynccontextmanager
async def _daemon(
    backend: BackendName, sessions: dict[str, str], **others: str
) -> AsyncGenerator[_Daemon]:
    given = {f"SESSIONS__{name}": value for name, value in sessions.items()} | others
    settings = {f"MCP_SANDBOX_{name}": value for name, value in given.items()}
    async with open_place(backend) as place:
        config = place.config
        where = ["--data", str(config.data_dir), "--socket", str(_socket(config))]
        async with await anyio.open_process(
            [_PROGRAM, "serve", *where, "--backend", config.backend],
            stdout=DEVNULL,
            stderr=DEVNULL,
            env={**server_variables(), **settings, "PATH": search_path()},
        ) as daemon:
            try:
                while not _socket(config).exists():  # noqa: ASYNC110  another process makes it
                    await anyio.sleep(0.01)
                yield _Daemon(config, daemon.pid)
            finally:
                daemon.terminate()


@asynccontextmanager
async def _full_house() -> AsyncGenerator[tuple[_Daemon, list[Client]]]:
    """So many chats that are open, each with its relay and its sandbox."""
    async with _daemon("docker", _ROOM) as daemon, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(daemon.chat("crowd", f"chat-{number}"))
            for number in range(_AT_ONCE)
        ]
        await _all_call(clients, times=1)
        yield daemon, clients


async def _all_call(clients: list[Client], times: int = _CALLS) -> None:
    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(_one_after_another, client, times)


async def _one_after_another(client: Client, times: int) -> None:
    for _ in range(times):
        await call(client, "exec", command="true")


async def _at_once(pairs: int) -> Measured:
    async with _full_house() as (_, clients):
        together = clocked(partial(_all_call, clients))
        alone = clocked(partial(_one_after_another, clients[0], _AT_ONCE * _CALLS))
        return await times_slower(together, alone, pairs)


async def _memory_at_once(values: int) -> Measured:
    found = []
    for _ in range(values):
        async with _full_house() as (daemon, clients):
            await _all_call(clients)
            found.append(await daemon.resident_mb())
    return Measured(tuple(found))


async def _growth(values: int) -> Measured:
    """How much larger the daemon gets with each quarter of the hour after the first one."""
    # So many containers would take the machine longer than the compressed hour.
    async with _daemon("bubblewrap", _COMPRESSED) as daemon:
        sizes = []
        for quarter in range(1 + values):
            await _come_and_go(daemon, range(quarter * _QUARTER, (quarter + 1) * _QUARTER))
            sizes.append(await daemon.resident_mb())
    return Measured(tuple(after - before for before, after in pairwise(sizes)))


async def _come_and_go(daemon: _Daemon, numbers: range) -> None:
    """New chats come evenly over their part of the hour; each works a little, and leaves."""
    with sole_error():
        async with anyio.create_task_group() as tasks:
            for number in numbers:
                tasks.start_soon(_short_chat, daemon, number)
                await anyio.sleep(_HOUR_S / _CHATS)


async def _short_chat(daemon: _Daemon, number: int) -> None:
    async with daemon.chat(f"user-{number % _USERS}", f"chat-{number}") as client:
        await call(client, "write_file", path="note.txt", content=f"{number}\n" * 1000)
        await call(client, "exec", command="seq 20000; sleep 1")
        await call(client, "run_code", code="print(open('note.txt').read()[:20])")
        await call(client, "read_file", path="note.txt")


async def _against_all(values: int) -> Measured:
    """How many times longer the slowest of a hundred calls takes while another chat attacks."""
    found = []
    async with _daemon("bubblewrap", {}) as daemon, daemon.chat("one", "quiet") as client:
        await _one_after_another(client, _HUNDRED)
        for _ in range(values):
            quiet = await _slowest(client)
            attacked = []
            for name, code in _ATTACKS.items():
                async with (
                    daemon.chat("other", name) as attacker,
                    anyio.create_task_group() as tasks,
                ):
                    tasks.start_soon(partial(attacker.call_tool, "run_code", {"code": code}))
                    attacked.append(await _slowest(client))
                    tasks.cancel_scope.cancel()
            found.append(max(attacked) / quiet)
    return Measured(tuple(found))


async def _flooded(values: int) -> Measured:
    """How many times longer calls take while another chat floods its door to allowed hosts."""
    walls = {"NETWORK": "allowlist", "LIMITS__CPUS": "1"}
    async with _daemon("bubblewrap", {}, **walls) as daemon, daemon.chat("one", "quiet") as client:
        found, calls = [], clocked(partial(_one_after_another, client, _HUNDRED))
        await calls()
        for _ in range(values):
            quiet = await calls()
            async with daemon.chat("other", "flood") as flooder, anyio.create_task_group() as tasks:
                tasks.start_soon(partial(flooder.call_tool, "run_code", {"code": _FLOOD}))
                await _one_after_another(client, _HUNDRED)
                found.append(await calls() / quiet)
                tasks.cancel_scope.cancel()
    return Measured(tuple(found))


async def _slowest(client: Client) -> float:
    """The time that all but one of a hundred calls stay under."""
    took = clocked(partial(_one_after_another, client, 1))
    return sorted([await took() for _ in range(_HUNDRED)])[-2]


ROWS = (
    Row(
        "crowd",
        f"{_AT_ONCE} chats at once, exec true {_CALLS} times each, one daemon, docker",
        "as many calls of one chat, one after another",
        Goal(1),
        _at_once,
        pairs=10,
        calls=_AT_ONCE * _CALLS,
    ),
    Row(
        "memory-crowd",
        f"the daemon with {_AT_ONCE} chats at once",
        "-",
        Goal(128, "MiB"),
        _memory_at_once,
        pairs=3,
    ),
    Row(
        "memory-hour",
        f"growth of the daemon by {_QUARTER} of {_CHATS} chats, an hour in {_HOUR_S:g} s",
        "-",
        Goal(2, "MiB"),
        _growth,
        pairs=3,
    ),
    Row(
        "one-against-all",
        "exec true while another chat attacks, p99 in the worst of its attacks, bubblewrap",
        "the same while none does",
        Goal(5),
        _against_all,
        pairs=5,
    ),
    Row(
        "door-flood",
        "exec true while another chat floods its door to allowed hosts, bubblewrap",
        "the same while none does",
        Goal(1.3),
        _flooded,
        pairs=5,
    ),
)
