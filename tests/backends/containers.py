"""Sandboxes of the docker backend for tests, and an engine that answers on TCP."""

import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import docker
from anyio.abc import ByteStream
from anyio.streams.tls import TLSListener

from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.docker.backend import DockerBackend, DockerSandbox
from mcp_sandbox.backends.docker.spec import instance_of
from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.models import Mount, SandboxSpec
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime

ENGINE_SOCKET = "/var/run/docker.sock"


def mounts(data_root: Path) -> tuple[Mount, ...]:
    """Directories of one chat, owned by the sandbox user."""
    found = []
    for kind, target in (("workspace", "/workspace"), ("home", "/home/sandbox")):
        path = data_root / "sandbox" / kind / "u" / "chat-c"
        path.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(path, *sandbox_user())
        found.append(Mount(path, target))
    return tuple(found)


def left_of(data_root: Path) -> list[str]:
    """Containers, networks and records of a data root that are there now."""
    engine = docker.from_env()
    label = f"mcp-sandbox.instance={instance_of(data_root)}"
    containers = [str(c.name) for c in engine.containers.list(all=True, filters={"label": label})]
    networks = [str(n.name) for n in engine.networks.list(filters={"label": label})]
    engine.close()
    run = data_root / "sandbox" / "run"
    records = [path.name for path in run.iterdir()] if run.is_dir() else []
    return sorted({*containers, *networks, *records})


@asynccontextmanager
async def backend_on(
    data_root: Path, config: DockerConfig | None = None
) -> AsyncGenerator[DockerBackend]:
    backend = DockerBackend(config or DockerConfig(), data_root)
    try:
        yield backend
    finally:
        with anyio.CancelScope(shield=True):
            await backend.aclose()


@asynccontextmanager
async def sandbox_of(backend: DockerBackend, spec: SandboxSpec) -> AsyncGenerator[DockerSandbox]:
    sandbox = await backend.create(spec)
    try:
        yield sandbox
    finally:
        with anyio.CancelScope(shield=True):
            await backend.destroy(sandbox.id)


@asynccontextmanager
async def runtime_of(sandbox: DockerSandbox) -> AsyncGenerator[Runtime]:
    async with anyio.create_task_group() as tasks:
        channel = Channel(await sandbox.open_channel(), sandbox.token)
        await channel.open(tasks)
        runtime = Runtime(channel, keep_bytes=1 << 20)
        try:
            yield runtime
        finally:
            with anyio.CancelScope(shield=True):
                await runtime.aclose()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def engine_on_tcp(
    *, tls: ssl.SSLContext | None = None, rewrite: tuple[bytes, bytes] = (b"", b"")
) -> AsyncGenerator[int]:
    """The local engine behind a TCP port; what it is asked may be changed on the way."""

    async def serve(client: ByteStream) -> None:
        async with (
            client,
            await local_socket.dial(ENGINE_SOCKET) as engine,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_copy, client, engine, rewrite)
            await _copy(engine, client, (b"", b""))
            tasks.cancel_scope.cancel()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port: int = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        served = TLSListener(listener, tls, standard_compatible=False) if tls else listener
        tasks.start_soon(served.serve, serve)
        yield port
        tasks.cancel_scope.cancel()


async def _copy(source: ByteStream, target: ByteStream, rewrite: tuple[bytes, bytes]) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError):
        async for data in source:
            await target.send(data.replace(*rewrite) if rewrite[0] else data)
        if isinstance(target, SocketStream):
            # Only towards the engine: what it has still to say goes on.
            await target.send_eof()
