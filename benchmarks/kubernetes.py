"""Chats in a cluster: that of KUBECONFIG with MCP_SANDBOX_REQUIRE=kubernetes, else the fake one.

The fake one is a process of its own, `python -m benchmarks.kubernetes FOLDER [VERSION]`. Its pods
are containers of the engine here: what a node does takes as long as it does for Docker.
"""

import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from unittest import mock

import anyio

from benchmarks.measure import Goal, Measured, Row, Side, clocked, times_slower
from benchmarks.places import Failed, checked, configured
from mcp_sandbox.app.chats import open_backend, open_manager, temporary_data
from mcp_sandbox.backends.kubernetes.backend import KubernetesBackend
from mcp_sandbox.backends.kubernetes.client import POD, ApiServer
from mcp_sandbox.backends.kubernetes.objects import TEMPLATE, VOLUME, WARM_POOL, Made
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId, SandboxSpec
from mcp_sandbox.sessions.manager import SessionManager
from tests.kubernetes.cluster import running
from tests.rclone import S3Server

_POOL = "benchmark"
_IS_REAL = "kubernetes" in os.environ.get("MCP_SANDBOX_REQUIRE", "").split(",")
_WHERE = "cluster of KUBECONFIG" if _IS_REAL else "fake cluster"


@contextmanager
def _cluster(folder: Path, *served: str) -> Iterator[None]:
    """Name a cluster in KUBECONFIG."""
    if _IS_REAL:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.kubernetes", str(folder / "cluster"), *served]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout
        with mock.patch.dict(os.environ, KUBECONFIG=process.stdout.readline().strip()):
            yield
        process.communicate()


@asynccontextmanager
async def _place(**given: object) -> AsyncGenerator[Config]:
    """Name a cluster and an object store, on an empty data root."""
    async with temporary_data() as folder, AsyncExitStack() as stack:
        store = await anyio.to_thread.run_sync(S3Server, folder / "s3" / "buckets")
        stack.callback(store.close)
        stack.enter_context(_cluster(folder, *(["v1beta1"] if "warm_pool" in given else [])))
        config = await configured(folder / "data", "kubernetes")
        settings = config.kubernetes.model_copy(update=given)
        yield config.model_copy(update={"kubernetes": settings, "storage": store.settings()})


def _new_chats(manager: SessionManager) -> Side:
    """Each turn is a chat that never was, until its first result."""
    numbers = count()

    async def side() -> float:
        chat = ChatId("benchmark", f"new-{next(numbers)}")
        session = await manager.session(chat)
        began = time.perf_counter()
        checked(await session.exec("echo 1"), "1\n")
        taken = time.perf_counter() - began
        await manager.remove(chat)
        return taken

    return side


async def _start(pairs: int) -> Measured:
    async with (
        _place(objects="pod") as config,
        open_manager(config) as manager,
        open_backend("kubernetes", config) as backend,
        aclosing(ApiServer(config.kubernetes)) as api,
    ):
        assert isinstance(backend, KubernetesBackend)
        bare = _BarePods(api, backend, config.kubernetes.image)
        return await times_slower(_new_chats(manager), bare.side, pairs)


class _BarePods:
    """Pods and their volumes as the backend makes them, with nothing around them."""

    def __init__(self, api: ApiServer, backend: KubernetesBackend, image: str) -> None:
        self._api = api
        self._image = image
        self._render = backend.renderer
        self._numbers = count()

    async def side(self) -> float:
        """Create both; return when the pod is ready."""
        name = f"benchmark-{next(self._numbers)}-{time.time_ns()}"
        made = Made.of(SandboxSpec(()), self._image, runner_digest())
        versions = [version async for _, version in self._api.pages(POD)]
        began = time.perf_counter()
        await self._api.post(VOLUME, self._render.owner(VOLUME, name, made))
        await self._api.post(POD, self._render.pod(name, made))
        async for event in self._api.watch(
            POD, versions[-1], fieldSelector=f"metadata.name={name}"
        ):
            conditions = event["object"].get("status", {}).get("conditions", [])
            if {"Ready": "True"}.items() <= {c["type"]: c["status"] for c in conditions}.items():
                taken = time.perf_counter() - began
                await self._api.delete(POD, name)
                await self._api.delete(VOLUME, name)
                return taken
        raise Failed(f"pod {name} did not become ready")


async def _warm(values: int) -> Measured:
    """The seconds of a new chat's first call, with a sandbox of the pool ready."""
    async with _place(storage="backups", warm_pool=_POOL) as config:
        await _make_pool(config)
        async with open_manager(config) as manager, aclosing(ApiServer(config.kubernetes)) as api:
            side, taken = _new_chats(manager), list[float]()
            while len(taken) <= values:
                await _wait_until_warm(api)
                taken.append(await side())
            for kind in (WARM_POOL, TEMPLATE):
                await api.delete(kind, _POOL)
            # The first opens the watches.
            return Measured(tuple(taken[1:]))


async def _make_pool(config: Config) -> None:
    async with open_backend("kubernetes", config) as backend:
        assert isinstance(backend, KubernetesBackend)
        made = Made.of(SandboxSpec(()), config.kubernetes.image, runner_digest())
        async with aclosing(ApiServer(config.kubernetes)) as api:
            for kind, body in zip(
                (TEMPLATE, WARM_POOL), backend.renderer.pool(made, 1), strict=True
            ):
                await api.post(kind, body)


async def _wait_until_warm(api: ApiServer) -> None:
    with anyio.fail_after(60):
        while True:
            pool = await api.get(WARM_POOL, _POOL)
            is_ready = pool.get("status", {}).get("readyReplicas")
            # What has just begun is still busy.
            await anyio.sleep(1 if is_ready else 0.2)
            if is_ready:
                return


async def _call(pairs: int) -> Measured:
    """How many milliseconds longer a call takes than the same on the local engine."""
    async with AsyncExitStack() as stack:
        sides = list[Side]()
        cluster = await stack.enter_async_context(_place())
        local = await configured(cluster.data_dir.with_name("local"), "docker")
        for config in (cluster, local):
            manager = await stack.enter_async_context(open_manager(config))
            session = await manager.session(ChatId("benchmark", "calls"))
            sides.append(clocked(partial(session.exec, "true")))
        ours, theirs = sides
        found = await times_slower(ours, theirs, pairs)
    both = zip(found.ours_s, found.theirs_s, strict=True)
    return replace(found, values=tuple((a - b) * 1000 for a, b in both))


async def _suspend(values: int) -> Measured:
    """The seconds until a chat's pod is gone."""
    taken = list[float]()
    async with _place() as config, open_manager(config) as manager:
        chat = ChatId("benchmark", "suspended")
        session = await manager.session(chat)
        for _ in range(values):
            await session.exec("true")
            began = time.perf_counter()
            await manager.pause(chat)
            taken.append(time.perf_counter() - began)
    return Measured(tuple(taken))


ROWS = (
    Row(
        "kubernetes-start",
        f"new chat to the result of echo 1, {_WHERE}",
        "its volume and its pod alone: until ready",
        Goal(1.3),
        _start,
        pairs=10,
    ),
    Row(
        "kubernetes-warm",
        f"new chat to the result of echo 1, a warm sandbox waiting for a second, seconds, {_WHERE}",
        "",
        Goal(0.15, "s"),
        _warm,
        pairs=10,
    ),
    Row(
        "kubernetes-call",
        f"exec, command true: milliseconds over the same call on the local engine, {_WHERE}",
        "exec, command true, docker",
        Goal(3, "ms"),
        _call,
        pairs=200,
    ),
    Row(
        "kubernetes-suspend",
        f"suspend a chat until its pod is gone, seconds, {_WHERE}",
        "",
        Goal(0.5, "s"),
        _suspend,
        pairs=10,
    ),
)


def _serve(folder: Path, versions: list[str]) -> None:
    """Run a cluster that serves Sandboxes of these versions, until the input ends."""
    with running(folder) as cluster:
        cluster.has_sandboxes = versions
        sys.stdout.write(os.environ["KUBECONFIG"] + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
