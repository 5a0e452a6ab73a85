"""How long sandboxes and files stay, on every backend, by a clock that the test sets."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import BackendUnavailable, CapacityReached, SandboxGone, WorkspaceFull
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.backends.live import chats_running
from tests.sessions.clocks import SetClock

HOUR_S, DAY_S = 3600.0, 24 * 3600.0
A, B = ChatId("u", "a"), ChatId("u", "b")


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def manager(config: Config, clock: SetClock) -> AsyncGenerator[SessionManager]:
    async with open_manager(config, clock=clock) as opened:
        yield opened


async def running(config: Config) -> list[str]:
    return sorted(info.labels["chat"] for info in await chats_running(config))


async def in_a_call(session: Session, meanwhile: Callable[[], Awaitable[None]]) -> str:
    """Do something while a call is under way; what the call said in the end."""
    started = anyio.Event()
    said: list[str] = []

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        wait = "echo started; until [ -e stop ]; do sleep 0.01; done; rm stop; cat /proc/1/stat"
        said.append((await session.exec(wait, on_output=note)).stdout)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            await meanwhile()
            await session.write_file("stop", b"")
    return said[0]


async def test_a_sandbox_that_nobody_uses_is_removed_and_its_files_stay(
    manager: SessionManager, config: Config, clock: SetClock
) -> None:
    session = await manager.session(A)
    await session.exec("echo kept > file")
    clock.pass_(HOUR_S - 1)
    await manager._reaper.look()
    assert await running(config) == ["a"]
    clock.pass_(1)
    await manager._reaper.look()
    assert await running(config) == []
    assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_call_under_way_and_background_work_keep_a_sandbox(
    manager: SessionManager, config: Config, clock: SetClock
) -> None:
    session = await manager.session(A)

    async def long_after() -> None:
        clock.pass_(2 * HOUR_S)
        await manager._reaper.look()

    assert (await in_a_call(session, long_after)).startswith("started")
    await session.exec("sleep 86395 & echo $! > pid")
    await long_after()
    assert await running(config) == ["a"]
    await session.exec("kill $(cat pid)")
    with anyio.fail_after(10):
        while (await manager.list())[0].background:
            await anyio.sleep(0.01)
    await long_after()
    assert await running(config) == []


async def test_a_sandbox_of_the_highest_age_is_replaced_with_all_that_runs_in_it(
    manager: SessionManager, config: Config, clock: SetClock
) -> None:
    session = await manager.session(A)
    await session.exec("sleep 86394 & echo kept > file")
    clock.pass_(DAY_S)
    await manager._reaper.look()
    assert await running(config) == []
    result = await session.exec("cat file; ps -eo args | grep -c '[s]leep 86394'")
    assert result.stdout == "kept\n0\n"


async def test_the_highest_age_waits_for_the_end_of_a_call_and_new_calls_for_the_new_sandbox(
    manager: SessionManager, clock: SetClock, config: Config
) -> None:
    session = await manager.session(A)
    later: list[str] = []
    await session.exec("sleep 86393 &")

    async def call() -> None:
        later.append((await session.exec("ps -eo args | grep -c '[s]leep 86393'")).stdout)

    async with anyio.create_task_group() as tasks:

        async def meanwhile() -> None:
            clock.pass_(DAY_S - 1)
            await session.write_file("seen", b"")
            clock.pass_(1)
            await manager._reaper.look()
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            assert later == []
            (config.data_dir / "sandbox/workspace/u/chat-a/stop").touch()

        with anyio.fail_after(30):
            started = anyio.Event()

            async def note(_name: str, _data: bytes) -> None:
                started.set()

            async def work() -> None:
                wait = "echo started; until [ -e stop ]; do sleep 0.01; done; echo whole"
                assert (await session.exec(wait, on_output=note)).stdout.endswith("whole\n")

            tasks.start_soon(work)
            await started.wait()
            await meanwhile()
    assert later == ["0\n"]


async def test_background_work_is_not_ended_to_make_room(config: Config) -> None:
    few = config.sessions.model_copy(update={"max_open": 1, "queue_wait": 0.0})
    async with open_manager(config.model_copy(update={"sessions": few})) as manager:
        worker, other = await manager.session(A), await manager.session(B)
        await worker.exec("sleep 86392 & echo $! > pid")
        with pytest.raises(CapacityReached, match="background"):
            await other.exec("true")
        await worker.exec("kill $(cat pid)")
        with anyio.fail_after(10):
            while (await manager.list())[0].background:
                await anyio.sleep(0.01)
        assert (await other.exec("echo now")).stdout == "now\n"
        assert await running(config) == ["b"]


async def test_files_that_nobody_used_go_to_the_trash_unless_their_sandbox_runs(
    manager: SessionManager, config: Config, clock: SetClock
) -> None:
    await (await manager.session(A)).exec("echo old > file")
    await (await manager.session(B)).exec("echo busy > file; sleep 86391 &")
    await manager.stop(A)
    clock.pass_(8 * DAY_S)
    report = await manager.collect(dry_run=True)
    assert [(item.kind, item.what) for item in report.items] == [("workspace", "u/a")]
    assert {row.chat for row in await manager.list()} == {A, B}
    assert (await manager.collect()).items == report.items
    assert [row.chat for row in await manager.list()] == [B]
    trash = config.data_dir / "sandbox" / "trash"
    (kept,) = trash.glob("*/workspace/file")
    assert kept.read_text() == "old\n"
    assert (await (await manager.session(A)).list_files(hidden=False)).total == 0
    assert (await (await manager.session(B)).exec("cat file")).stdout == "busy\n"


async def test_the_next_server_knows_when_a_chat_began_and_was_used(
    config: Config, clock: SetClock
) -> None:
    async with open_manager(config, clock=clock) as manager:
        await (await manager.session(A)).exec("true")
        clock.pass_(DAY_S)
        await (await manager.session(A)).exec("true")
        (before,) = await manager.list()
    clock.pass_(5 * DAY_S)
    async with open_manager(config, clock=clock) as manager:
        (after,) = await manager.list()
    async with open_manager(config, clock=clock) as manager:
        await (await manager.session(A)).exec("true")
        (again,) = await manager.list()
    assert again.created_at == before.created_at
    assert (after.last_used_at - after.created_at).total_seconds() == DAY_S
    assert (after.chat, after.created_at) == (before.chat, before.created_at)
    volume = config.backend == "kubernetes" and config.kubernetes.storage == "volume"
    assert after.state == ("paused" if volume else "warm")


async def test_a_lost_record_costs_nothing_but_the_times_of_use(
    config: Config, clock: SetClock
) -> None:
    async with open_manager(config, clock=clock) as manager:
        session = await manager.session(A)
        await session.exec("echo kept > file")
        note = config.data_dir / "sandbox/records/u/chat-a.json"
        for ruin in (note.unlink, lambda: note.write_bytes(b"garbage" * 10_000)):
            ruin()
            assert (await session.exec("cat file")).stdout == "kept\n"
            assert [row.chat for row in await manager.list()] == [A]
            await manager._context.use_times.write()
    note.unlink()
    clock.pass_(30 * DAY_S)
    async with open_manager(config, clock=clock) as manager:
        assert [row.chat for row in await manager.list()] == [A]
        assert (await manager.collect()).items == ()
        assert (await (await manager.session(A)).exec("cat file")).stdout == "kept\n"


@pytest.mark.parametrize("ruin", ["garbage", "another backend", "gone"])
async def test_a_chat_whose_backend_is_lost_is_told_and_never_loses_its_isolation(
    config: Config, ruin: str
) -> None:
    async with open_manager(config) as manager:
        await (await manager.session(A)).exec("echo kept > file")
    note = config.data_dir / "sandbox/records/u/chat-a.json"
    if ruin == "gone":
        note.unlink()
    elif ruin == "garbage":
        note.write_bytes(b"\xff\xfe")
    else:
        note.write_text(json.dumps(json.loads(note.read_bytes()) | {"backend": "punchcards"}))
    async with open_manager(config) as manager:
        session = await manager.session(A)
        if config.backend == "unsafe-local" and ruin != "gone":
            for _ in range(2):
                with pytest.raises(BackendUnavailable, match="--backend bubblewrap"):
                    await session.exec("cat file")
            return
        assert (await session.exec("cat file")).stdout == "kept\n"
        (told,) = await session.take_notices()
        assert f"it is on {config.backend} now" in told
        await session.exec("true")
        assert await session.take_notices() == []
    assert json.loads(note.read_bytes())["backend"] == config.backend


async def test_the_chats_of_a_user_share_a_quota(config: Config) -> None:
    small = config.workspace.model_copy(update={"user_quota": 4 * 1024**2, "min_free": 0})
    async with open_manager(config.model_copy(update={"workspace": small})) as manager:
        first, second = await manager.session(A), await manager.session(B)
        await first.write_file("big", bytes(3_000_000))
        with anyio.fail_after(20):
            while (await second.info()).usage.limit_bytes > 2_000_000:
                await anyio.sleep(0.1)
        with pytest.raises(WorkspaceFull, match="all chats of this user together are full"):
            await second.write_file("big", bytes(2_000_000))
        ended = await second.exec("head -c 2000000 /dev/zero > big; sleep 40", timeout_s=50)
        assert (ended.killed_because or "").startswith("all chats of this user together are full")
        await first.delete_file("big")
        await (await manager.session(ChatId("v", "a"))).write_file("big", bytes(3_000_000))


async def test_a_shell_that_stays_open_holds_up_no_call_at_the_highest_age(
    manager: SessionManager, clock: SetClock
) -> None:
    session = await manager.session(A)
    await session.exec("echo kept > file")
    shown = anyio.Event()

    async def typed() -> AsyncGenerator[bytes]:
        await anyio.sleep_forever()
        yield b""

    async def show(_data: bytes) -> None:
        shown.set()

    args = {"env": {"TERM": "dumb"}, "tty": True, "size": [24, 80], "command": []}

    async def person() -> None:
        with pytest.raises(SandboxGone):
            await session.shell(typed(), show, args=args)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(person)
            await shown.wait()
            clock.pass_(DAY_S)
            assert (await session.exec("cat file")).stdout == "kept\n"


async def test_the_age_of_a_sandbox_is_known_to_whoever_finds_it(
    manager: SessionManager, config: Config, clock: SetClock
) -> None:
    await (await manager.session(A)).exec("sleep 86390 &")
    clock.pass_(DAY_S - 10)
    async with open_manager(config, clock=clock) as second:
        found = await second.session(A)
        assert (await found.exec("ps -eo args | grep -c '[s]leep 86390'")).stdout == "1\n"
        clock.pass_(10)
        # Each leaves it to the other, the last one ends it.
        await second._reaper.look()
        assert await running(config) == ["a"]
        await manager._reaper.look()
        assert await running(config) == []
        assert (await found.exec("ps -eo args | grep -c '[s]leep 86390'")).stdout == "0\n"


async def test_nothing_is_paused_by_itself(manager: SessionManager, clock: SetClock) -> None:
    session = await manager.session(A)
    await session.exec("true")
    clock.pass_(HOUR_S - 1)
    await manager._reaper.look()
    assert [row.state for row in await manager.list()] == ["running"]


async def test_a_sandbox_of_a_chat_without_files_is_ended_on_request(
    manager: SessionManager, config: Config
) -> None:
    await (await manager.session(A)).exec("true")
    await (await manager.session(B)).exec("true")
    (config.data_dir / "sandbox/workspace/u/chat-a").rename(config.data_dir / "taken-away")
    report = await manager.collect()
    assert [(item.kind, item.what) for item in report.items] == [("sandbox", "u/a")]
    assert await running(config) == ["b"]
