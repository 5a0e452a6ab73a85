"""Warm sandboxes: as many as there should be, replaced when they die, each for one new chat."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import Config
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId, SandboxInfo, SandboxSpec
from mcp_sandbox.sessions.sandbox.warm_pool import WarmPool
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.workspace.pool import PoolFolder
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("ann", "c1")


@dataclass
class Watched:
    """A real backend that notes how many creations are under way, and fails when it is told to."""

    inner: Backend
    failures: int = 0
    created: int = 0
    changed: str = ""
    most_at_once: int = 0
    gate: anyio.Event | None = None
    _under_way: int = 0
    tried: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def origin(self, image: str = "") -> str:
        return await self.inner.origin(image) + self.changed

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.tried.append(anyio.current_time())
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            if self.gate:
                await self.gate.wait()
            if self.failures:
                self.failures -= 1
                raise BackendUnavailable("planned")
            self.created += 1
            return await self.inner.create(spec)
        finally:
            self._under_way -= 1


@dataclass
class Place:
    backend: Watched
    config: Config
    tasks: TaskGroup
    pools: list[WarmPool] = field(default_factory=list)

    def pool(
        self,
        size: int = 1,
        *,
        max_age_s: float = 60.0,
        free: Callable[[], int] = lambda: 16,
        look_after_s: float = 10.0,
    ) -> WarmPool:
        folder = PoolFolder(self.config.data_dir, users=SandboxUsers(one=sandbox_user()))
        settings = SessionSettings(pool_size=size, pool_max_age_s=max_age_s)
        pool = WarmPool(
            self.backend, folder, settings, self.tasks, free=free, look_after_s=look_after_s
        )
        self.pools.append(pool)
        return pool

    async def running(self) -> Sequence[SandboxInfo]:
        return await self.backend.inner.running()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(40):
        while not holds():
            await anyio.sleep(0.02)


async def until_idle(pool: WarmPool, count: int) -> None:
    def full() -> bool:
        found = pool.statistics()
        return (found["idle"], found["busy"]) == (count, 0)

    await until(full)


@asynccontextmanager
async def open_place(config: Config) -> AsyncGenerator[Place]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend, anyio.create_task_group() as tasks:
        place = Place(Watched(backend), config, tasks)
        yield place
        for pool in place.pools:
            await pool.stop()
        assert [info.labels for info in await backend.running() if "chat" not in info.labels] == []
        tasks.cancel_scope.cancel()


@pytest.fixture
async def place(config: Config) -> AsyncGenerator[Place]:
    async with open_place(config) as opened:
        yield opened


async def test_a_pool_fills_two_at_a_time_and_leaves_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mcp_sandbox")
    place.backend.gate = anyio.Event()
    pool = place.pool(3)
    pool.start()
    await until(lambda: len(place.backend.tried) == 2)
    await anyio.wait_all_tasks_blocked()
    assert len(place.backend.tried) == 2
    place.backend.gate.set()
    await until_idle(pool, 3)
    assert place.backend.most_at_once == 2
    assert len(await place.running()) == 3
    made = {info.id for info in await place.running()}
    await pool.stop()
    for what in ("started", "ended"):
        told = [vars(each) for each in caplog.records if each.msg == f"warm sandbox {what}"]
        assert {each["sandbox"] for each in told} == made
    assert await place.running() == []
    for name in ("pool", "trash"):
        assert list((place.config.data_dir / "sandbox" / name).iterdir()) == []


async def test_a_pool_is_not_filled_past_the_free_places(place: Place) -> None:
    free = 1
    pool = place.pool(2, free=lambda: free)
    pool.start()
    await until_idle(pool, 1)
    free = 0
    with pool.foreground():
        pass
    await until_idle(pool, 0)
    assert await place.running() == []


async def test_nothing_is_begun_while_somebody_waits(place: Place) -> None:
    pool = place.pool(2)
    with pool.foreground():
        pool.start()
        await anyio.wait_all_tasks_blocked()
        assert place.backend.tried == []
        ended = anyio.current_time()
    await until_idle(pool, 2)
    assert min(place.backend.tried) > ended


async def test_one_that_dies_is_replaced(place: Place) -> None:
    pool = place.pool()
    pool.start()
    await until_idle(pool, 1)
    (first,) = await place.running()
    await place.backend.destroy(first.id)
    await until(lambda: place.backend.created == 2)
    await until_idle(pool, 1)
    (second,) = await place.running()
    assert second.id != first.id


async def test_one_that_is_too_old_is_replaced(place: Place) -> None:
    pool = place.pool(max_age_s=0.5)
    pool.start()
    await until(lambda: place.backend.created >= 2)
    await pool.stop()
    assert await place.running() == []


async def test_one_that_would_be_made_otherwise_now_is_replaced(place: Place) -> None:
    pool = place.pool(look_after_s=0.2)
    pool.start()
    await until_idle(pool, 1)
    (first,) = await place.running()
    place.backend.changed = "another image"
    await until(lambda: place.backend.created == 2)
    await until_idle(pool, 1)
    (second,) = await place.running()
    assert second.id != first.id
    assert second.labels["spec"] != first.labels["spec"]


async def test_one_that_is_stuck_is_replaced(place: Place) -> None:
    pool = place.pool(look_after_s=0.2)
    pool.start()
    await until_idle(pool, 1)
    (first,) = await place.running()
    if not await (await place.backend.attach(first.id)).pause():
        pytest.skip("cannot be made to stand still")
    await until(lambda: place.backend.created == 2)
    await until_idle(pool, 1)
    (second,) = await place.running()
    assert second.id != first.id


@pytest.mark.slow
async def test_a_failed_warm_up_is_tried_again_later_and_later(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.backend.failures = 2
    pool = place.pool()
    pool.start()
    await until_idle(pool, 1)
    first, second, third = place.backend.tried
    assert second - first >= 1
    assert third - second >= 2
    assert caplog.text.count("planned") == 2


async def test_a_pool_stopped_in_the_middle_of_a_start_leaves_nothing(place: Place) -> None:
    place.backend.gate = anyio.Event()
    pool = place.pool(2)
    pool.start()
    await until(lambda: len(place.backend.tried) == 2)
    await pool.stop()
    assert await place.running() == []
    assert list((place.config.data_dir / "sandbox" / "pool").iterdir()) == []
