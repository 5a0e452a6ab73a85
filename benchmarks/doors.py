"""Connections by a list of allowed hosts against the same on the host, all in one small world."""

import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

from benchmarks.forwarder import PORT
from benchmarks.measure import Goal, Measured, Row, Side, clocked, times_faster, times_slower
from benchmarks.places import Failed, configured, in_thread
from mcp_sandbox.app.chats import temporary_data
from mcp_sandbox.config import server_variables
from tests import world as worlds

_TUNNELLED, _OPENED = "plain.example.com", "read.example.com"
_SIZE = 200_000_000
_ONE_BY_ONE, _AT_ONCE, _CALLS = 50, 60, 20
_FORWARDED = f"http://127.0.0.1:{PORT}"


@dataclass(frozen=True)
class _Places:
    """A world, and a sandbox of a server in it."""

    world: worlds.World
    client: Client

    async def inside(self, script: str) -> str:
        """What a script prints in the sandbox."""
        result = await self.client.call_tool("exec", {"command": script, "wait_s": 55})
        if result.is_error:
            raise Failed(f"{script} inside: {result.content}")
        return str(getattr(result.content[0], "text", ""))

    async def outside(self, script: str, proxy: str = "") -> str:
        """What it prints on the host."""
        words = ["env", f"https_proxy={proxy}", "bash", "-c", script]
        done = await in_thread(partial(self.world.run, *words, timeout_s=60))
        if done.returncode:
            raise Failed(f"{script} outside: {done.stderr}")
        return done.stdout


@asynccontextmanager
async def _places(runtime: str = "") -> AsyncGenerator[_Places]:
    if (reason := worlds.absent()) is not None:
        raise Failed(f"no network namespace: {reason}")
    async with temporary_data() as folder:
        folder.chmod(0o755)
        room = folder / "world"
        room.mkdir()
        with worlds.opened(room) as world:
            server = await _server(folder, world, runtime)
            enter = [*worlds.entering(world.pid), sys.executable, "-m", "benchmarks.forwarder"]
            async with await anyio.open_process(enter, stderr=None) as forwarder:
                try:
                    if forwarder.stdout is None or await forwarder.stdout.receive() != b"ready\n":
                        raise Failed("the forwarder did not start")
                    async with Client(server) as client:
                        yield _Places(world, client)
                finally:
                    forwarder.terminate()


async def _server(folder: Path, world: worlds.World, runtime: str) -> StdioServerParameters:
    config = await configured(folder / "data", "docker")
    settings: dict[str, Any] = {
        "network": "allowlist",
        "egress": {"allow": [_TUNNELLED, {"host": _OPENED, "read": True}]},
        "docker": {"image": config.docker.image, "runtime": runtime},
    }
    file = folder / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    file.parent.mkdir(parents=True)
    # JSON is YAML.
    file.write_text(json.dumps(settings))
    arguments = [*worlds.entering(world.pid), sys.executable, "-m", "mcp_sandbox", "stdio"]
    arguments += ["--data", str(folder / "data"), "--backend", "docker", "--chat", "one"]
    env = {**server_variables(), "HOME": str(folder), "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    return StdioServerParameters(command=arguments[0], args=arguments[1:], env=env)


def _download(host: str, size: int = _SIZE) -> str:
    return f"curl -sSf -o /dev/null -w '%{{time_total}}\\n' https://{host}/bytes/{size}"


def _one_by_one(host: str) -> str:
    return (
        f"begun=$(date +%s%N); for n in $(seq {_ONE_BY_ONE}); do curl -sSf -o /dev/null "
        f"https://{host}/a || exit; done; echo $(($(date +%s%N) - begun))e-9"
    )


def _inside(places: _Places, script: str) -> Side:
    """The side whose script prints how many seconds it took, in the sandbox."""

    async def side() -> float:
        return float((await places.inside(script)).split()[0])

    return side


def _outside(places: _Places, script: str, proxy: str = "") -> Side:
    async def side() -> float:
        return float((await places.outside(script, proxy)).split()[0])

    return side


async def _tunnelled(pairs: int) -> Measured:
    async with _places() as places:
        script = _download(_TUNNELLED)
        theirs = _outside(places, script, _FORWARDED)
        return await times_faster(_inside(places, script), theirs, pairs)


async def _directly(pairs: int) -> Measured:
    async with _places() as places:
        script = _download(_TUNNELLED)
        return await times_faster(_inside(places, script), _outside(places, script), pairs)


async def _opened(pairs: int) -> Measured:
    async with _places() as places:
        theirs = _inside(places, _download(_TUNNELLED))
        return await times_faster(_inside(places, _download(_OPENED)), theirs, pairs)


async def _small(pairs: int) -> Measured:
    async with _places() as places:
        script = _one_by_one(_TUNNELLED)
        return await times_slower(_inside(places, script), _outside(places, script), pairs)


async def _at_once(values: int) -> Measured:
    """How many of the answers are good."""
    script = (
        f"seq {_AT_ONCE} | xargs -P {_AT_ONCE} -I{{}} curl -sS -o /dev/null -w '%{{http_code}}\\n' "
        f"https://{_TUNNELLED}/a; true"
    )
    async with _places() as places:
        said = [await places.inside(script) for _ in range(values)]
    return Measured(tuple(float(each.split().count("200")) for each in said))


async def _calls(pairs: int) -> Measured:
    async with _places() as places:

        async def calls() -> None:
            for _ in range(_CALLS):
                await places.inside("true")

        async def busy() -> float:
            await places.inside(
                f"curl -s -D head https://{_TUNNELLED}/endless >/dev/null 2>&1 & "
                "echo $! > pid; until [ -s head ]; do sleep 0.02; done"
            )
            try:
                return await clocked(calls)()
            finally:
                await places.inside("kill $(cat pid); rm -f head")

        return await times_slower(busy, clocked(calls), pairs)


async def _on_gvisor(values: int) -> Measured:
    """In MB/s."""
    size = _SIZE // 4
    async with _places("runsc") as places:
        side = _inside(places, _download(_TUNNELLED, size))
        return Measured(tuple([size / 1e6 / await side() for _ in range(values)]))


ROWS = (
    Row(
        "doors-tunnelled",
        "200 MB by HTTPS from an allowed host, curl in docker",
        "curl on the host through a forwarder of 30 lines",
        Goal(0.5, at_least=True),
        _tunnelled,
        pairs=5,
    ),
    Row(
        "doors-direct",
        "the same",
        "curl on the host, direct",
        Goal(0, at_least=True),
        _directly,
        pairs=5,
    ),
    Row(
        "doors-opened",
        "200 MB by HTTPS from a host that may be read alone, whose TLS is opened, curl in docker",
        "from a host that is allowed, whose TLS is not opened",
        Goal(0.25, at_least=True),
        _opened,
        pairs=5,
    ),
    Row(
        "doors-small",
        f"{_ONE_BY_ONE} curls one after another, docker",
        "curl on the host, direct",
        Goal(3),
        _small,
        pairs=5,
        calls=_ONE_BY_ONE,
    ),
    Row(
        "doors-at-once",
        f"good answers to {_AT_ONCE} curls at once, docker",
        "-",
        Goal(_AT_ONCE, "of 60", at_least=True),
        _at_once,
        pairs=3,
    ),
    Row(
        "doors-calls",
        "MCP client: exec true during a download, docker",
        "the same without one",
        Goal(4),
        _calls,
        pairs=5,
        calls=_CALLS,
    ),
    Row(
        "doors-gvisor",
        "HTTPS from an allowed host, curl in gVisor",
        "-",
        Goal(0, "MB/s", at_least=True),
        _on_gvisor,
        pairs=3,
    ),
)
