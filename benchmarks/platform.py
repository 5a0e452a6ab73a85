"""What a platform waits for: prepare, a command by the control API, a chat saved and restored."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from itertools import count
from pathlib import Path

import httpx2
from anyio import to_thread
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.client import call
from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, checked, outwait_deletions
from mcp_sandbox.app.chats import open_manager, temporary_data
from mcp_sandbox.config import Config
from mcp_sandbox.models import BackendName
from mcp_sandbox.storage.redis import SandboxBoard
from tests.control.daemon import Platform, platform, token
from tests.rclone import S3Server
from tests.redis_server import RedisServer

_MADE = "for n in $(seq 600); do head -c 8500 /dev/urandom > $n; done; ls | wc -l"
_NO_RATE = {"MCP_SANDBOX_HTTP__RATE": "1000000"}


@asynccontextmanager
async def _platform(
    backend: BackendName, pool: int = 0
) -> AsyncGenerator[tuple[Platform, RedisServer]]:
    async with temporary_data() as folder:
        with closing(await to_thread.run_sync(RedisServer)) as redis:
            more = {"MCP_SANDBOX_FLEET__REDIS": redis.url, "MCP_SANDBOX_POOL__SIZE": str(pool)}
            async with platform(folder, backend, {**_NO_RATE, **more}) as opened:
                yield opened, redis


async def _prepared(values: int, backend: BackendName, pool: int, *, key: bool) -> Measured:
    """The seconds until prepare of a new chat is answered, or from then until its key is there."""
    taken: list[float] = []
    async with _platform(backend, pool) as (plane, redis), aclosing(SandboxBoard(redis.url)) as at:
        for number in range(values + 1):
            while pool and (await plane.data("GET", "stats"))["pool"].get("idle", 0) < 1:
                continue
            began = time.perf_counter()
            session = await plane.prepare(f"c{number}")
            answered = time.perf_counter()
            await at.wait(session["id"])
            taken.append(time.perf_counter() - answered if key else answered - began)
            await plane.data("POST", f"sandbox/{session['id']}/terminate")
    return Measured(tuple(taken[1:]))


async def _exec_against_mcp(pairs: int) -> Measured:
    async with _platform("docker") as (plane, _):
        session = await plane.made((await plane.prepare("c"))["id"])
        secret = await token(plane.place, CHAT.user, "mcp")
        headers = {"Authorization": f"Bearer {secret}", "Mcp-Sandbox-Chat": CHAT.chat}
        path, true = f"sandbox/{session['id']}/exec", {"command": "true"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(f"{plane.url}/mcp", http_client=http)) as client,
        ):
            ours = partial(plane.ask, "POST", path, json=true)
            theirs = partial(call, client, "exec", command="true")
            return await times_slower(clocked(ours), clocked(theirs), pairs)


async def _saved(values: int, *, restored: bool) -> Measured:
    """The seconds of a save of 600 files, or of a first call that restores them elsewhere.

    Both servers have had chats before: their copies of the runner are there.
    """
    taken: list[float] = []
    if restored:
        await outwait_deletions()
    async with temporary_data() as folder:
        with closing(await to_thread.run_sync(S3Server, folder / "s3" / "buckets")) as store:
            for number in count():
                if number > values:
                    return Measured(tuple(taken[1:]))
                async with open_manager(_config(store, folder / "one")) as manager:
                    checked(await (await manager.session(CHAT)).exec(_MADE), "600\n")
                    began = time.perf_counter()
                    await manager.backups.save(CHAT)
                    saved = time.perf_counter()
                async with open_manager(_config(store, folder / "two")) as manager:
                    session = await manager.session(CHAT)
                    opened = time.perf_counter()
                    checked(await session.exec("ls | wc -l"), "600\n")
                    ended = time.perf_counter()
                    taken.append(ended - opened if restored else saved - began)
                    await manager.remove(CHAT)
    raise AssertionError


def _config(store: S3Server, data_dir: Path) -> Config:
    return Config(data_dir=data_dir, backend="bubblewrap", storage=store.settings())


_NEW = "prepare a new chat by the control API, seconds"
ROWS = (
    Row(
        "prepare",
        f"{_NEW} to the answer, docker",
        "",
        Goal(0.02, "s"),
        partial(_prepared, backend="docker", pool=0, key=False),
    ),
    Row(
        "prepared",
        f"{_NEW} from the answer to the key in Redis, docker, cold",
        "",
        Goal(1, "s"),
        partial(_prepared, backend="docker", pool=0, key=True),
        pairs=10,
    ),
    Row(
        "prepared-warm",
        f"{_NEW} from the answer to the key in Redis, docker, warm",
        "",
        Goal(0.1, "s"),
        partial(_prepared, backend="docker", pool=1, key=True),
        pairs=10,
    ),
    Row(
        "api",
        "control API: exec, command true, docker",
        "MCP client over HTTP: tool exec, command true, docker",
        Goal(2),
        _exec_against_mcp,
        pairs=200,
    ),
    Row(
        "restore",
        "first call elsewhere that restores them, seconds, bubblewrap",
        "",
        Goal(0.4, "s"),
        partial(_saved, restored=True),
        pairs=10,
    ),
    Row(
        "save",
        "save 600 files of 5 MB to an object store, seconds, bubblewrap",
        "",
        Goal(0.6, "s"),
        partial(_saved, restored=False),
        pairs=10,
    ),
)
