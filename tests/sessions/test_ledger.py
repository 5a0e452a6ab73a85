"""What is known of chats is written behind the calls, and survives a store that fails."""

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.store import SessionRecord
from mcp_sandbox.sessions.store_sqlite import SqliteStore
from tests.sessions.clocks import NOON, SetClock

ANN, BOB = ChatId("ann", "one"), ChatId("bob", "one")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncGenerator[SqliteStore]:
    async with aclosing(SqliteStore(path)) as opened:
        yield opened


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def ledger(store: SqliteStore, clock: SetClock) -> Ledger:
    return Ledger(store, "docker", clock)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOON + seconds, UTC)


async def test_what_is_noted_is_known_at_once_and_written_later(
    ledger: Ledger, store: SqliteStore
) -> None:
    ledger.note(ANN, "running", sandbox_id=SandboxId("mcs-1"), image="base", spec="d1")
    with anyio.fail_after(1):
        await ledger.news()
    noted = ledger.get(ANN)
    assert noted is not None
    assert (noted.state, noted.image, noted.created_at) == ("running", "base", at(0))
    assert await store.all() == []
    await ledger.write()
    assert await store.all() == [noted]


async def test_a_chat_keeps_its_id_its_birth_and_what_it_was_made_from(
    ledger: Ledger, clock: SetClock
) -> None:
    ledger.note(ANN, "running", sandbox_id=SandboxId("mcs-1"), image="base", spec="d1")
    first = ledger.get(ANN)
    clock.pass_(60)
    ledger.note(ANN, "warm")
    second = ledger.get(ANN)
    assert first is not None
    assert second is not None
    assert (second.id, second.created_at, second.image, second.spec) == (
        first.id,
        at(0),
        "base",
        "d1",
    )
    assert (second.state, second.sandbox_id) == ("warm", None)


async def test_use_is_written_with_its_time_and_counted_without_the_wall_clock(
    ledger: Ledger, store: SqliteStore, clock: SetClock
) -> None:
    ledger.note(ANN, "running")
    clock.pass_(100)
    ledger.used(ANN)
    clock.pass_(30)
    clock.jump(86_400)
    assert ledger.idle_s(ANN) == 30
    assert ledger.idle_s(BOB) == 0
    await ledger.write()
    (record,) = await store.all()
    assert record.last_used_at == at(100)
    assert ledger.all() == [record]


async def test_what_other_processes_wrote_is_taken_in(
    ledger: Ledger, path: Path, clock: SetClock
) -> None:
    async with aclosing(SqliteStore(path)) as other_store:
        other = Ledger(other_store, "bubblewrap", clock)
        other.note(BOB, "running")
        await other.write()
        ledger.note(ANN, "running")
        await ledger.read()
        assert {record.chat for record in ledger.all()} == {ANN, BOB}
        other.forget(BOB)
        await other.write()
        await ledger.write()
        await ledger.read()
        assert [record.chat for record in ledger.all()] == [ANN]


async def test_a_forgotten_chat_is_unknown_until_it_is_noted_again(
    ledger: Ledger, store: SqliteStore
) -> None:
    ledger.note(ANN, "running")
    await ledger.write()
    ledger.forget(ANN)
    await ledger.read()
    assert ledger.get(ANN) is None
    ledger.note(ANN, "running")
    await ledger.write()
    assert [record.chat for record in await store.all()] == [ANN]
    ledger.forget(ANN)
    await ledger.write()
    assert await store.all() == []


async def test_a_lost_store_gets_back_what_this_process_used(
    ledger: Ledger, store: SqliteStore, path: Path
) -> None:
    for chat in (ANN, BOB):
        ledger.note(chat, "running")
        ledger.used(chat)
    await ledger.write()
    path.write_bytes(b"garbage" * 5000)
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    path.unlink()
    await ledger.read()
    await ledger.write()
    assert {record.chat for record in await store.all()} == {ANN, BOB}


async def test_what_a_failing_store_refused_is_written_when_it_works(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    async with aclosing(SqliteStore(blocked / "sessions.sqlite")) as store:
        ledger = Ledger(store, "docker", clock)
        ledger.note(ANN, "running")
        clock.pass_(5)
        ledger.used(ANN)
        ledger.note(BOB, "running")
        for _ in range(3):
            await ledger.write()
            await ledger.read()
        ledger.forget(BOB)
        await ledger.write()
        assert [record.chat for record in ledger.all()] == [ANN]
        assert len([r for r in caplog.records if "trying again" in r.message]) == 1
        os.unlink(blocked)
        await ledger.write()
        (record,) = await store.all()
        assert (record.chat, record.last_used_at) == (ANN, at(5))


class HeldUpStore(SqliteStore):
    """A store that is held up in the midst of writing, and says at once what it held before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before: Sequence[SessionRecord] = ()
        self.writing, self.go_on = anyio.Event(), anyio.Event()

    async def put(self, record: SessionRecord) -> None:
        self.writing.set()
        await self.go_on.wait()
        await super().put(record)

    async def all(self, user: str | None = None) -> Sequence[SessionRecord]:
        return self.before


async def test_reading_in_the_midst_of_writing_brings_nothing_old_back(
    path: Path, ledger: Ledger, store: SqliteStore, clock: SetClock
) -> None:
    for chat in (ANN, BOB):
        ledger.note(chat, "warm")
    await ledger.write()
    async with aclosing(HeldUpStore(path)) as held_up:
        held_up.before = await store.all()
        slow = Ledger(held_up, "docker", clock)
        for chat in (ANN, BOB):
            slow.note(chat, "running", sandbox_id=SandboxId("mcs-1"))
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(slow.write)
                await held_up.writing.wait()
                tasks.start_soon(slow.read)
                await anyio.wait_all_tasks_blocked()
                held_up.go_on.set()
    assert {record.state for record in await store.all()} == {"running"}
