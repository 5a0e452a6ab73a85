"""The places whose sandboxes may be out of sight for a while, each behind what makes them so."""

import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.docker import client as docker_client
from mcp_sandbox.backends.docker import exec_stream
from mcp_sandbox.backends.e2b import client as e2b_client
from mcp_sandbox.backends.kubernetes import backend as pods
from mcp_sandbox.backends.kubernetes import client as api_client
from mcp_sandbox.config import Config
from mcp_sandbox.config.sections import DockerConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime import channel
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.sandbox import lifecycle
from tests import rclone
from tests.backends.containers import ENGINE_SOCKET
from tests.conftest import configured
from tests.e2b_server import serving
from tests.e2e.faults.engine import Engine
from tests.kubernetes.cluster import Cluster
from tests.unreachable.proxy import FAULTS, proxied

# The limits that a user waits for, scaled.
_LIMITS: dict[object, dict[str, float]] = {
    channel: {"SILENT_S": 0.5, "ASKED_S": 1.0},
    lifecycle: {"_ALIVE_S": 1.0, "_DYING_S": 0.3},
    docker_client: {"_SLOW_S": 0.5, "_KNOWN_S": 0.2},
    exec_stream: {"_TIMEOUT_S": 0.7, "_QUIET_S": 0.3},
    pods: {"_REACH_S": 1.5, "_KNOWN_S": 0.2, "_GONE_S": 2.0, "_TOLD_S": 1.0},
    api_client: {"_CALL_S": 1.0, "_ANSWERS_S": 1.0, "_FIRST_ANSWER_S": 1.0, "_KNOWN_S": 0.2},
    e2b_client: {"_REQUEST_S": 2.0, "_CONNECT_S": 1.0},
}


@dataclass
class Place:
    """One of them; `strike` has it out of sight, and `strike(None)` brings it back."""

    name: str
    config: Config
    strike: Callable[[str | None], Awaitable[None]]


_DOCKER = [pytest.mark.docker, pytest.mark.s3]
_CLUSTER = [*_DOCKER, pytest.mark.kubernetes]
_E2B = [pytest.mark.e2b, pytest.mark.s3, pytest.mark.bubblewrap]
_MARKS = {
    "docker by its socket": _DOCKER,
    "docker by exec": _DOCKER,
    "runsc by exec": [*_DOCKER, pytest.mark.runsc, pytest.mark.whole],
    "kubernetes": _CLUSTER,
    "kubernetes-backups": _CLUSTER,
    "e2b": _E2B,
}
NODES = ("not ready", "kubelet hangs")
EVERY = [
    pytest.param(name, fault, marks=marks, id=f"{name}-{fault}")
    for name, marks in _MARKS.items()
    for fault in (*FAULTS, *(NODES if name.startswith("kubernetes") else ()))
]
# Another engine takes all cores as it starts.
HERE = pytest.param("engine here", "is killed", marks=[*_DOCKER, pytest.mark.alone])


def limit_waits(patch: pytest.MonkeyPatch) -> None:
    for module, values in _LIMITS.items():
        for name, value in values.items():
            patch.setattr(module, name, value)


async def _dial(host: str, port: int) -> ByteStream:
    return await anyio.connect_tcp(host, port)


async def _dial_engine() -> ByteStream:
    return await local_socket.dial(ENGINE_SOCKET)


@asynccontextmanager
async def _docker(name: str, root: Path) -> AsyncGenerator[Place]:
    by_socket = name != "docker by exec"
    # A path of at most 108 bytes.
    path = Path(f"/tmp/mcp-sandbox-test-{os.getpid()}.sock") if by_socket else None
    async with proxied(_dial_engine, path) as proxy:
        host = f"unix://{path}" if path else f"tcp://127.0.0.1:{proxy.port}"
        yield Place(name, _at(host, name, root), proxy.set)
    if path:
        path.unlink(missing_ok=True)


def _at(host: str, name: str, root: Path) -> Config:
    docker = DockerConfig(host=host, runtime="runsc" if name.startswith("runsc") else "")
    store = rclone.shared().settings(prefix=f"at{os.urandom(8).hex()}")
    return Config(data_dir=root, backend="docker", docker=docker, storage=store)


@asynccontextmanager
async def _engine_here(name: str, root: Path, engine: Engine) -> AsyncGenerator[Place]:
    """An engine of ours, which is killed and started again: that ends what it has running."""
    is_up = True

    async def strike(fault: str | None) -> None:
        nonlocal is_up
        if fault:
            await to_thread.run_sync(engine.end, signal.SIGKILL)
        elif not is_up:
            await to_thread.run_sync(engine.start_again)
        is_up = fault is None

    yield Place(name, _at(engine.address, name, root), strike)


@asynccontextmanager
async def _cluster(
    name: str, root: Path, fake: Cluster, patch: pytest.MonkeyPatch
) -> AsyncGenerator[Place]:
    async with proxied(partial(_dial, *fake.socket.getsockname()[:2])) as proxy:
        file = fake.kubeconfig(f"http://127.0.0.1:{proxy.port}")
        patch.setenv("KUBECONFIG", str(file))

        async def strike(fault: str | None) -> None:
            if fault in NODES:
                await to_thread.run_sync(_strike_node, fake, fault)
            elif fault is None:
                await proxy.set(None)
                await to_thread.run_sync(fake.do, fake.node.come_back)
            else:
                await proxy.set(fault)

        try:
            yield Place(name, configured(name, root), strike)
        finally:
            fake.do(fake.node.come_back)


def _strike_node(fake: Cluster, fault: str) -> None:
    if fault == "not ready":
        fake.do(fake.node.lose, 50.0)
        fake.cut()
    else:
        fake.node.hangs = True


@asynccontextmanager
async def _e2b(name: str, root: Path, patch: pytest.MonkeyPatch) -> AsyncGenerator[Place]:
    with serving() as url:
        at = urlsplit(url)
        async with proxied(partial(_dial, at.hostname or "", at.port or 0)) as proxy:
            for variable in ("E2B_API_URL", "E2B_SANDBOX_URL"):
                patch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
            yield Place(name, configured(name, root), proxy.set)


def place_of(
    name: str, root: Path, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch
) -> AbstractAsyncContextManager[Place]:
    limit_waits(patch)
    if name == "e2b":
        if os.environ.get("E2B_API_KEY"):
            pytest.skip("the service itself does not fail when it is told to")
        return _e2b(name, root, patch)
    if name.startswith("kubernetes"):
        fake = request.getfixturevalue("cluster")
        if fake is None:
            pytest.skip("a real cluster is not to be broken")
        fake.reset()
        return _cluster(name, root, fake, patch)
    if name == "engine here":
        return _engine_here(name, root, request.getfixturevalue("engine"))
    return _docker(name, root)


async def save_due(manager: SessionManager, chat: ChatId) -> None:
    """Save the chat if it has changed, as is done regularly."""
    async with manager.backups.before_end(chat):
        pass
