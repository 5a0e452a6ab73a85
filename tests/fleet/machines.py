"""Two machines: a daemon each, with a data root of its own, one Redis and one object store."""

import json
import shutil
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio import to_thread
from anyio.abc import SocketAttribute, SocketStream, TaskGroup, TaskStatus
from mcp import Client
from redis.asyncio import Redis

from mcp_sandbox.web.tokens import TokenFile
from tests.daemon.running import Daemon, Place, listening, place, starting
from tests.fleet.networks import Host, Network
from tests.rclone import S3Server
from tests.redis_server import RedisServer
from tests.web.clients import MODERN, connected, http_client

LEASE_S = 3.0
ALONE = Network("127.0.0.1", (Host(), Host()))


@dataclass
class Machine:
    """One server; its client has a token of the scope control."""

    name: str
    host: Host
    port: int
    place: Place
    http: httpx2.AsyncClient
    secrets: dict[str, str]
    tasks: TaskGroup
    daemon: Daemon = field(init=False)
    ended: anyio.Event = field(init=False)

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"

    async def start(self) -> None:
        self.ended = anyio.Event()
        self.daemon = await self.tasks.start(self._run)

    async def _run(self, *, task_status: TaskStatus[Daemon]) -> None:
        ended = self.ended
        try:
            async with starting(self.place, "--http", f"{self.host.address}:{self.port}") as daemon:
                await listening(self.place)
                await daemon.noted("MCP over HTTP at ")
                task_status.started(daemon)
                await daemon.end()
        finally:
            ended.set()

    async def kill(self) -> None:
        self.daemon.process.kill()
        await self.ended.wait()

    async def stop(self) -> None:
        """End it as an operator does."""
        if not self.ended.is_set():
            self.strike(signal.SIGCONT)
            self.daemon.process.terminate()
            await self.ended.wait()

    def strike(self, number: signal.Signals) -> None:
        self.daemon.process.send_signal(number)

    async def ask(self, method: str, path: str, **given: Any) -> httpx2.Response:
        return await self.http.request(method, f"{self.url}/api/{path}", **given)

    async def prepare(self, chat: str) -> Any:
        response = await self.ask("POST", "sandbox/prepare", json={"chatSessionId": chat})
        assert response.status_code == 200, response.text
        return response.json()["data"]["sandboxSession"]

    async def answer(self, session_id: str, command: str, **more: Any) -> Any:
        """How a command ended; raises what it failed with."""
        given = {"json": {"command": command}, **more}
        response = await self.ask("POST", f"sandbox/{session_id}/exec", **given)
        told = json.loads(response.text.splitlines()[-1])
        if "data" not in told:
            raise RuntimeError(f"{response.status_code} {told}")
        return told

    async def run(self, session_id: str, command: str) -> str:
        """What a command prints."""
        text: str = (await self.answer(session_id, command))["data"]["stdout"]
        return text

    @asynccontextmanager
    async def agent(self, chat: str) -> AsyncGenerator[Client]:
        """An MCP client in a chat."""
        headers = {"authorization": f"Bearer {self.secrets['mcp']}", "Mcp-Sandbox-Chat": chat}
        async with connected(f"{self.url}/mcp", MODERN, headers) as client:
            yield client

    def files(self, chat: str) -> Path:
        """Where this machine has the files of a chat."""
        return self.place.data / "sandbox" / "workspace" / "ada" / f"chat-{chat}"

    async def saved(self, session_id: str) -> None:
        response = await self.ask("POST", f"sandbox/{session_id}/sync")
        assert response.status_code == 200, response.text


class Line:
    """A cable between `a` and Redis: while it is cut nothing passes, and nobody is told."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.whole = anyio.Event()
        self.whole.set()

    def cut(self) -> None:
        self.whole = anyio.Event()

    async def serve(self, *, task_status: TaskStatus[int]) -> None:
        async with await anyio.create_tcp_listener(local_host=self._host) as listener:
            task_status.started(listener.extra(SocketAttribute.local_port))
            await listener.serve(self._connect)

    async def _connect(self, near: SocketStream) -> None:
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with near, await anyio.connect_tcp(self._host, self._port) as far:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._carry, near, far, tasks.cancel_scope)
                    tasks.start_soon(self._carry, far, near, tasks.cancel_scope)

    async def _carry(
        self, source: SocketStream, target: SocketStream, both: anyio.CancelScope
    ) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                await self.whole.wait()
                await target.send(data)
        both.cancel()


@dataclass
class Fleet:
    """The machines `a` and `b`; `line` is that between `a` and Redis."""

    a: Machine
    b: Machine
    redis: RedisServer
    store: S3Server
    line: Line

    async def asked(self, *command: str) -> Any:
        async with Redis.from_url(self.redis.url, decode_responses=True) as redis:
            return await redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def has(self, chat: str) -> str | None:
        """The name of the server that has a chat of ada's."""
        lease = await self.asked("GET", f"lease:ada/{chat}")
        return json.loads(lease)["owner"] if lease else None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    *,
    backend: str = "bubblewrap",
    lease_s: float = LEASE_S,
    grown: bool = True,
    network: Network = ALONE,
    shared_data: bool = False,
    module: str = "mcp_sandbox",
    settings: Mapping[str, str] | None = None,
) -> AsyncGenerator[Fleet]:
    """`grown`: the Redis has known leases for long. `shared_data`: both have one data directory.

    `module` is the program of both.
    """
    redis = await to_thread.run_sync(partial(RedisServer, host=network.address))
    store = await to_thread.run_sync(S3Server, tmp_path / "s3" / "buckets", network.address)
    try:
        shared = {
            **store.variables(),
            "MCP_SANDBOX_CONTROL__ENABLED": "true",
            "MCP_SANDBOX_FLEET__REDIS": redis.url,
            "MCP_SANDBOX_FLEET__LEASE": f"{lease_s}s",
            "MCP_SANDBOX_FLEET__SHARED_DATA_DIR": str(shared_data).lower(),
            "MCP_SANDBOX_STORAGE__AFTER": "60s",
            **(settings or {}),
        }
        async with anyio.create_task_group() as tasks, _clients() as clients:
            line = Line(redis.host, redis.port)
            cut = redis.url.replace(str(redis.port), str(await tasks.start(line.serve)))
            made = partial(_machine, backend=backend, module=module, tasks=tasks, clients=clients)
            a, b = [
                await to_thread.run_sync(partial(made, shared=more), tmp_path / name, name, host)
                for name, host, more in zip(
                    ("a", "b"),
                    network.hosts,
                    ({**shared, "MCP_SANDBOX_FLEET__REDIS": cut}, shared),
                    strict=True,
                )
            ]
            found = Fleet(a, b, redis, store, line)
            if grown:
                await found.asked("SET", "born", "1")
            async with anyio.create_task_group() as starting_both:
                starting_both.start_soon(a.start)
                starting_both.start_soon(b.start)
            while await found.asked("EXISTS", "server:a", "server:b") < 2:
                await anyio.sleep(0.02)
            try:
                yield found
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(20):
                    await a.stop()
                    await b.stop()
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(redis.close)
            await to_thread.run_sync(store.close)


def on_engines(
    tmp_path: Path,
    network: Network,
    settings: Mapping[str, str] | None = None,
    *,
    shared_data: bool = False,
) -> AbstractAsyncContextManager[Fleet]:
    """A fleet on the engines of a network, with no containers but those of chats."""
    settings = {"MCP_SANDBOX_POOL__SIZE": "0", **(settings or {})}
    return fleet(
        tmp_path, backend="docker", network=network, shared_data=shared_data, settings=settings
    )


@asynccontextmanager
async def _clients() -> AsyncGenerator[list[httpx2.AsyncClient]]:
    made: list[httpx2.AsyncClient] = []
    try:
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            for client in made:
                await client.aclose()


def _machine(
    folder: Path,
    name: str,
    host: Host,
    *,
    backend: str,
    module: str,
    shared: dict[str, str],
    tasks: TaskGroup,
    clients: list[httpx2.AsyncClient],
) -> Machine:
    """A machine that is not started, with the same tokens as the first."""
    port = free_port()
    own = {"FLEET__NAME": name, "FLEET__URL": f"http://{host.address}:{port}"}
    if host.engine:
        own["DOCKER__HOST"] = host.engine.address
    more = {f"MCP_SANDBOX_{key}": value for key, value in own.items()}
    where = place(folder, backend, {**shared, **more})
    where = replace(where, beside=host.pid, module=module)
    if shared["MCP_SANDBOX_FLEET__SHARED_DATA_DIR"] == "true":
        where = replace(where, data=folder.parent / "data")
    first, known = folder.parent / "a" / "data" / "sandbox", folder.parent / "secrets.json"
    if not known.exists():
        add = TokenFile(where.data).add
        known.write_text(json.dumps({s: add("ada", scope=s)[1] for s in ("control", "mcp")}))
    elif name != "a" and where.data.is_relative_to(folder):
        shutil.copytree(first, where.data / "sandbox")
    secrets = json.loads(known.read_text())
    headers = {"authorization": f"Bearer {secrets['control']}"}
    clients.append(http_client(headers=headers, timeout=40))
    return Machine(name, host, port, where, clients[-1], secrets, tasks)
