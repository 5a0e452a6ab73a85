"""When an open sandbox is paused, removed or replaced, and when files are looked at."""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.reaper import Reaper, next_step
from mcp_sandbox.sessions.settings import Lifetimes
from mcp_sandbox.sessions.store_sqlite import SqliteStore
from mcp_sandbox.workspace.retention import DAY_S, WATCHED_S
from tests.sessions.clocks import SetClock
from tests.sessions.test_cleaning import Server, served

LIFETIMES = Lifetimes(pause_after_s=100, remove_after_s=400, lifetime_s=1000)
CHAT = ChatId("ann", "one")


@dataclass
class Sandbox:
    """An open sandbox in any state, which notes what is done with it."""

    chat: ChatId = CHAT
    is_busy: bool = False
    is_paused: bool = False
    is_dead: bool = False
    in_background: bool = False
    age_s: float = 0.0
    done: list[str] = field(default_factory=list)

    async def bury(self) -> None:
        self.done.append("bury")

    async def expire(self) -> None:
        self.done.append("expire")

    async def leave(self) -> None:
        self.done.append("leave")

    async def pause(self) -> None:
        self.done.append("pause")


@pytest.mark.parametrize(
    ("sandbox", "idle_s", "expected"),
    [
        (Sandbox(), 99, None),
        (Sandbox(), 100, "pause"),
        (Sandbox(is_paused=True), 100, None),
        (Sandbox(is_paused=True), 400, "remove"),
        (Sandbox(is_busy=True), 400, None),
        (Sandbox(is_dead=True), 0, "bury"),
        (Sandbox(is_dead=True, is_busy=True), 0, None),
        (Sandbox(age_s=999), 0, None),
        (Sandbox(age_s=1000), 0, "expire"),
        (Sandbox(age_s=1000, is_busy=True), 0, "expire"),
    ],
)
def test_each_step_has_its_time(sandbox: Sandbox, idle_s: float, expected: str | None) -> None:
    assert next_step(sandbox, idle_s, LIFETIMES) == expected


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def server(tmp_path: Path, clock: SetClock) -> AsyncGenerator[Server]:
    async with served(tmp_path, clock) as opened:
        yield opened


def reaper_of(server: Server, clock: SetClock, *sandboxes: Sandbox) -> Reaper:
    return Reaper(lambda: sandboxes, server.ledger, server.cleaning, LIFETIMES, clock)


async def test_a_sandbox_is_paused_and_then_removed_as_time_passes(
    server: Server, clock: SetClock
) -> None:
    sandbox = Sandbox()
    server.ledger.used(CHAT)
    reaper = reaper_of(server, clock, sandbox)
    for _ in range(5):
        clock.pass_(99)
        await reaper.look()
        sandbox.is_paused = "pause" in sandbox.done
    assert sandbox.done == ["pause", "leave"]


async def test_background_work_and_calls_keep_it_as_if_it_were_used(
    server: Server, clock: SetClock
) -> None:
    working, busy = Sandbox(in_background=True), Sandbox(ChatId("ann", "two"), is_busy=True)
    reaper = reaper_of(server, clock, working, busy)
    for _ in range(9):
        clock.pass_(90)
        await reaper.look()
    working.in_background = busy.is_busy = False
    clock.pass_(99)
    await reaper.look()
    assert working.done == busy.done == []
    clock.pass_(1)
    await reaper.look()
    assert working.done == busy.done == ["pause"]


async def test_a_jump_of_the_clock_pauses_nothing(server: Server, clock: SetClock) -> None:
    sandbox = Sandbox()
    server.ledger.used(CHAT)
    clock.jump(365 * DAY_S)
    await reaper_of(server, clock, sandbox).look()
    assert sandbox.done == []


async def test_one_that_fails_or_hangs_holds_up_no_other(
    server: Server, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = anyio.Event()

    class Failing(Sandbox):
        async def bury(self) -> None:
            raise BackendUnavailable("the engine does not answer")

    class Hanging(Sandbox):
        async def bury(self) -> None:
            await stuck.wait()

    well = Sandbox(is_dead=True)
    reaper = reaper_of(server, clock, Failing(is_dead=True), Hanging(is_dead=True), well)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaper.look)
            await anyio.wait_all_tasks_blocked()
            assert well.done == ["bury"]
            stuck.set()
    assert "could not be looked after" in caplog.text


async def test_news_of_the_ledger_are_written_at_once(
    tmp_path: Path, server: Server, clock: SetClock
) -> None:
    path = tmp_path / "data" / "sandbox" / "sessions.sqlite"
    await server.workspaces.open(CHAT)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks, aclosing(SqliteStore(path)) as reading:
            tasks.start_soon(reaper_of(server, clock).run)
            await anyio.wait_all_tasks_blocked()
            server.ledger.note(CHAT, "running")
            while [record.state for record in await reading.all()] != ["running"]:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


async def test_old_files_go_soon_after_the_start_and_then_on_schedule(
    server: Server, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock begins at 22:13.
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    reaper = reaper_of(server, clock)
    gone: list[float] = []
    files = {await server.use(ChatId("u", "a")): 0, await server.use(ChatId("u", "b")): 0}
    clock.pass_(8 * DAY_S)
    reaper = reaper_of(server, clock)
    first, second = files
    second_chat = ChatId("u", "b")
    server.sandboxes.add(second_chat)
    begun = clock().steady_s
    while first.exists() or second.exists():
        await reaper.look_at_files()
        if not first.exists():
            server.sandboxes.clear()
            gone.append(clock().steady_s - begun)
        clock.pass_(60)
        assert clock().steady_s < begun + 2 * DAY_S
    assert gone[0] == WATCHED_S
    # Three o'clock is 4 hours and 46 minutes and 40 seconds after the start.
    assert gone[-1] == pytest.approx(4 * 3600 + 46 * 60 + 40, abs=60)


async def test_a_data_root_that_fails_is_looked_at_again(
    tmp_path: Path, server: Server, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    reaper = reaper_of(server, clock)
    (tmp_path / "data").mkdir(exist_ok=True)
    os.chmod(tmp_path / "data", 0o777)
    await reaper.look_at_files()
    assert "others may write" in caplog.text
    os.chmod(tmp_path / "data", 0o700)
    clock.pass_(3600)
    await reaper.look_at_files()
    assert caplog.text.count("others may write") == 1
