"""A daemon in a world of its own, a chat in it, and what asks for connections in the sandbox."""

import base64
import json
import os
import re
import shlex
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from mcp_sandbox.config import DockerConfig
from tests.daemon.running import Client, Daemon, Done, Place, command, in_chat, place, running
from tests.e2e.attacks import BUBBLEWRAP
from tests.world import World

CHAT = "work"
# Hosts with a rule: opened for no reason, read only, with a secret, at one port, not of the web.
PLAIN, READ, BOUND, CODE = (f"{name}.example.com" for name in ("plain", "read", "api", "code"))
AT_PORT, DATABASE, LOCAL = "one.example.org:8443", "db.example.lan:5432", "host.internal:9000"
# Each has a rule, and an address that nothing may reach.
TRAPS = tuple(
    f"{name}.example.com"
    for name in ("private", "loopback", "loopback6", "metadata", "mapped", "mixed")
)
# Hosts whose secret cannot be had, by what is wrong with its source.
BROKEN = {
    "missing": "file:/nowhere/at/all",
    "slow": "command: sleep 3600",
    "empty": "command: true",
    "lines": "command: printf 'two-long-lines\\nof-a-secret'",
    "long": "command: head -c 5000 /dev/zero",
    "short": "command: echo short",
}
TOKEN, GIT_TOKEN = 'tok/en+0123456789"~%41', "gitsecret0123456789"
LIMIT_S = 600
# What is the work of the server alone is the same under every backend.
in_bubblewrap = pytest.mark.parametrize("served", [BUBBLEWRAP], indirect=True, scope="module")


def settings(folder: Path) -> dict[str, Any]:
    """The operator's settings; the values of secrets lie in files beneath a folder."""
    sources = {"API_TOKEN": TOKEN, "GIT_TOKEN": GIT_TOKEN}
    for name, value in sources.items():
        (folder / name).write_text(f"{value}\n")
    return {
        "network": "allowlist",
        "egress": {
            "allow": [
                *("packages", "git", PLAIN, BOUND, CODE, "*.example.org:8443", *TRAPS),
                *("rebind.example.com", *(f"broken-{name}.example.net" for name in BROKEN)),
                {"host": READ, "read": True},
                _private(DATABASE),
                _private(LOCAL),
            ],
            "deny": ["gist.example.com", "denied.example.org:8443"],
        },
        "secrets": {
            "API_TOKEN": {"from": f"file:{folder / 'API_TOKEN'}", "hosts": [BOUND]},
            "GIT_TOKEN": {"from": f"command: cat {folder / 'GIT_TOKEN'}", "hosts": [CODE]},
            "KEY_TOKEN": {
                "from": f"file:{folder / 'API_TOKEN'}",
                "hosts": [BOUND],
                "header": "x-api-key",
            },
            "ANNS_TOKEN": {
                "from": f"file:{folder / 'API_TOKEN'}",
                "hosts": [BOUND],
                "users": ["ann"],
            },
            **{
                f"{name.upper()}_TOKEN": {"from": source, "hosts": [f"broken-{name}.example.net"]}
                for name, source in BROKEN.items()
            },
        },
    }


def _private(target: str) -> dict[str, Any]:
    host, _, port = target.partition(":")
    return {"host": host, "port": int(port), "private": True}


@dataclass(frozen=True)
class Chat:
    """A chat of a client; its sandbox has `knock.py`."""

    client: Client

    async def call(self, tool: str, **arguments: object) -> str:
        """All that the agent reads of a result."""
        result = await self.client.call(tool, **arguments)
        return "\n".join(part.get("text", "") for part in result["content"])

    async def bash(self, script: str, timeout_s: float = 60) -> str:
        return await self.call("exec", command=script, timeout_s=timeout_s, wait_s=55)

    async def python(self, code: str) -> str:
        return await self.call("run_code", code=code, language="python")

    async def knock(
        self, *heads: bytes | Sequence[bytes], tls: str = "", most: int = 2000
    ) -> list[str]:
        """Send each of them to the door at once, a list of pieces one by one; the answers.

        An answer is what comes until it ends or pauses, of which `most` bytes are returned. With
        `tls` they go through a tunnel to that host, inside the TLS of whoever answers there.
        """
        asked = [[base64.b64encode(piece).decode() for piece in _pieces(each)] for each in heads]
        await self.call("write_file", path="asked.json", content=json.dumps(asked))
        await self.call("write_file", path="knock.py", content=_KNOCK)
        said = await self.bash(f"python3 knock.py {most} {tls} < asked.json")
        answers = json.loads(said.split("\n")[0])
        return [base64.b64decode(each).decode("latin-1") for each in answers]


def _pieces(head: bytes | Sequence[bytes]) -> Sequence[bytes]:
    return [head] if isinstance(head, bytes) else head


_KNOCK = """
import base64, json, socket, ssl, sys, time
from concurrent.futures import ThreadPoolExecutor

def knock(pieces):
    said = b""
    try:
        with socket.create_connection(("127.0.0.1", 17329), 15) as line:
            if sys.argv[2:]:
                line = tunnelled(line, sys.argv[2])
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(0.002)
                line.sendall(base64.b64decode(piece))
            while data := line.recv(65536):
                said += data
                line.settimeout(0.5)
    except OSError as exc:
        said = said or type(exc).__name__.encode()
    return base64.b64encode(said[:int(sys.argv[1])]).decode()

def tunnelled(line, host):
    line.sendall(f"CONNECT {host}:443 HTTP/1.1\\r\\nHost: {host}:443\\r\\n\\r\\n".encode())
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += line.recv(1) or sys.exit(f"closed after {head}")
    return ssl.create_default_context().wrap_socket(line, server_hostname=host)

with ThreadPoolExecutor(16) as pool:
    print(json.dumps(list(pool.map(knock, json.load(sys.stdin)))))
"""


@dataclass(frozen=True)
class Served:
    """A daemon in a world, with a chat that has a sandbox."""

    world: World
    place: Place
    daemon: Daemon
    chat: Chat
    backend: str

    async def people(self, name: str, *arguments: str, asks: bool = True) -> Done:
        """Run a command line as a person would; see `command`."""
        return await command(self.place, name, *arguments, asks=asks)

    @asynccontextmanager
    async def other(self, name: str, **more: object) -> AsyncGenerator[Chat]:
        """Another chat."""
        async with in_chat(self.place, name, **more) as client:
            yield Chat(client)


def placed(
    world: World, folder: Path, backend: str, changes: Mapping[str, Any] | None = None
) -> Place:
    """Where a daemon runs in a world, with our settings in the user's file."""
    # What it binds into sandboxes must be reachable for their users.
    folder.chmod(0o755)
    name = "bubblewrap" if backend == "bubblewrap" else "docker"
    image = os.environ.get("MCP_SANDBOX_DOCKER__IMAGE", DockerConfig().image)
    docker = {"image": image, "runtime": "runsc" if backend == "docker-runsc" else ""}
    # One backend with warm sandboxes will do.
    pool = {"size": 1 if backend == "docker" else 0}
    own = {"data_dir": str(folder / "data"), "docker": docker, "pool": pool}
    given = {**settings(folder), **own, **(changes or {})}
    file = folder / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(given))
    return replace(place(folder, name), beside=world.pid)


@asynccontextmanager
async def served(world: World, where: Place, backend: str) -> AsyncGenerator[Served]:
    async with running(where, limit_s=LIMIT_S) as daemon, anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.keep_log)
        async with in_chat(where, CHAT) as client:
            yield Served(world, where, daemon, Chat(client), backend)
        tasks.cancel_scope.cancel()


@contextmanager
def undisturbed(world: World) -> Iterator[None]:
    """No canary hears anything in the block."""
    with world.hearing("canary") as heard:
        yield
    assert not heard, heard


def quoted(*words: str) -> str:
    return shlex.join(words)


def statuses(answers: Sequence[str]) -> list[int]:
    """The first status of each answer; 0 where there is none."""
    found = [re.match(r"HTTP/1\.[01] (\d{3})", each) for each in answers]
    return [int(each[1]) if each else 0 for each in found]


def connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()
