"""When an open sandbox is removed or replaced, and when files are looked at."""

import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import SessionsConfig
from mcp_sandbox.config.values import DAY_S
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.cleaning import Reaper, next_step
from mcp_sandbox.sessions.sandbox.context import ChatUse
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.workspace.retention import WATCHED_S
from tests.sessions.clocks import SetClock
from tests.sessions.test_cleaning import Server, served

SETTINGS = SessionSettings(sessions=SessionsConfig(remove_after=400, lifetime=1000))
CHAT = ChatId("ann", "one")


class Sandbox:
    """An open sandbox in any state, which notes what is done with it."""

    def __init__(self, name: str = "one", **use: object) -> None:
        self.chat = ChatId("ann", name)
        self.now = ChatUse(open=True, **use)  # type: ignore[arg-type]
        self.done: list[str] = []

    def use(self) -> ChatUse:
        return self.now

    async def release_if_idle(self, *, background_too: bool = False) -> bool:
        self.done.append("end with its background" if background_too else "end")
        return True


@pytest.mark.parametrize(
    ("use", "idle_s", "expected"),
    [
        (ChatUse(), 399, None),
        (ChatUse(paused=True), 400, "remove"),
        (ChatUse(), 400, "remove"),
        (ChatUse(calls=1), 400, None),
        (ChatUse(starting=True), 400, None),
        (ChatUse(dead=True), 0, "discard"),
        (ChatUse(dead=True, calls=1), 0, None),
        (ChatUse(age_s=999), 0, None),
        (ChatUse(age_s=1000), 0, "expire"),
        (ChatUse(age_s=1000, background=3), 0, "expire"),
        (ChatUse(age_s=1000, calls=1), 0, None),
    ],
)
def test_each_step_has_its_time(use: ChatUse, idle_s: float, expected: str | None) -> None:
    assert next_step(use, idle_s, SETTINGS.sessions) == expected


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def server(tmp_path: Path, clock: SetClock) -> AsyncGenerator[Server]:
    async with served(tmp_path, clock) as opened:
        yield opened


def reaper_of(server: Server, *sandboxes: Sandbox) -> Reaper:
    # What each has been used for is what a test says.
    return Reaper(lambda: sandboxes, server.cleaning, SETTINGS)  # type: ignore[return-value,arg-type]


async def test_a_sandbox_is_removed_when_nobody_used_it_for_long(
    server: Server, clock: SetClock
) -> None:
    sandbox = Sandbox()
    server.ledger.note_use(CHAT)
    reaper = reaper_of(server, sandbox)
    for _ in range(4):
        clock.pass_(99)
        await reaper.look()
    assert sandbox.done == []
    clock.pass_(4)
    await reaper.look()
    assert sandbox.done == ["end"]


async def test_a_paused_one_is_removed_with_its_background(server: Server, clock: SetClock) -> None:
    sandbox = Sandbox(paused=True, background=1)
    server.ledger.note_use(CHAT)
    clock.pass_(399)
    await reaper_of(server, sandbox).look()
    assert sandbox.done == []
    clock.pass_(1)
    await reaper_of(server, sandbox).look()
    assert sandbox.done == ["end with its background"]


async def test_an_old_one_is_ended_with_its_background(server: Server, clock: SetClock) -> None:
    sandbox = Sandbox(age_s=1000.0, background=1)
    await reaper_of(server, sandbox).look()
    assert sandbox.done == ["end with its background"]


async def test_background_work_and_calls_keep_it_as_if_it_were_used(
    server: Server, clock: SetClock
) -> None:
    working, busy = Sandbox(background=1), Sandbox("two", calls=1)
    reaper = reaper_of(server, working, busy)
    for _ in range(9):
        clock.pass_(390)
        await reaper.look()
    working.now = busy.now = ChatUse(open=True)
    clock.pass_(399)
    await reaper.look()
    assert working.done == busy.done == []
    clock.pass_(1)
    await reaper.look()
    assert working.done == busy.done == ["end"]


async def test_a_jump_of_the_clock_ends_nothing(server: Server, clock: SetClock) -> None:
    sandbox = Sandbox()
    server.ledger.note_use(CHAT)
    clock.jump(365 * DAY_S)
    await reaper_of(server, sandbox).look()
    assert sandbox.done == []


async def test_one_that_fails_or_hangs_holds_up_no_other(
    server: Server, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = anyio.Event()

    class Failing(Sandbox):
        async def release_if_idle(self, *, background_too: bool = False) -> bool:
            raise BackendUnavailable("the engine does not answer")

    class Hanging(Sandbox):
        async def release_if_idle(self, *, background_too: bool = False) -> bool:
            await stuck.wait()
            return True

    well = Sandbox(dead=True)
    reaper = reaper_of(server, Failing(dead=True), Hanging(dead=True), well)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaper.look)
            await anyio.wait_all_tasks_blocked()
            assert well.done == ["end"]
            stuck.set()
    assert "cannot check its sandbox" in caplog.text


async def test_old_files_go_soon_after_the_start_and_then_on_schedule(
    server: Server, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock begins at 22:13.
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    reaper = reaper_of(server)
    gone: list[float] = []
    files = {await server.use(ChatId("u", "a")): 0, await server.use(ChatId("u", "b")): 0}
    clock.pass_(8 * DAY_S)
    reaper = reaper_of(server)
    first, second = files
    second_chat = ChatId("u", "b")
    server.used.add(second_chat)
    begun = clock().steady_s
    while first.exists() or second.exists():
        await reaper.look_at_files()
        if not first.exists():
            server.used.clear()
            gone.append(clock().steady_s - begun)
        clock.pass_(60)
        assert clock().steady_s < begun + 2 * DAY_S
    assert gone[0] == WATCHED_S
    # Three o'clock is 4 hours and 46 minutes and 40 seconds after the start.
    assert gone[-1] == pytest.approx(4 * 3600 + 46 * 60 + 40, abs=60)


async def test_a_data_root_that_fails_is_looked_at_again(
    tmp_path: Path, server: Server, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    reaper = reaper_of(server)
    (tmp_path / "data").mkdir(exist_ok=True)
    os.chmod(tmp_path / "data", 0o777)
    await reaper.look_at_files()
    assert "others may write" in caplog.text
    os.chmod(tmp_path / "data", 0o700)
    clock.pass_(3600)
    await reaper.look_at_files()
    assert len(caplog.records) == 1
