"""Old files go through the trash; what is used stays, whatever clocks and stores do."""

import os
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.cleaning import Cleaning, GcItem
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.store_sqlite import SqliteStore
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.retention import DAY_S, WATCHED_S
from tests.sessions.clocks import SetClock

OWNER = (os.geteuid(), os.getegid())
OLD, NEW = ChatId("ann", "old"), ChatId("ann", "new")
YEAR_S = 365 * DAY_S


class Server:
    """What one server of the data root knows, and does about old files."""

    def __init__(self, data_root: Path, store: SqliteStore, clock: SetClock, keep_s: float) -> None:
        self.used: set[ChatId] = set()
        self.forgotten: list[ChatId] = []
        self.running: dict[SandboxId, ChatId] = {}
        self.locked: list[ChatId] = []
        self.workspaces = Workspaces(data_root, owner=OWNER, now=lambda: clock().wall_s)
        self.ledger = Ledger(store, "docker", clock)
        self.snapshots = Snapshots(data_root, kept_s=0)
        self.cleaning = Cleaning(
            self.workspaces,
            self.ledger,
            keep_s=keep_s,
            # Which chats are in use is what each test says.
            guard=self,  # type: ignore[arg-type]
            snapshots=self.snapshots,
        )

    @asynccontextmanager
    async def lock(self, chat: ChatId) -> AsyncGenerator[None]:
        self.locked.append(chat)
        yield

    async def in_use(self) -> Collection[ChatId]:
        return self.used

    async def sandboxes(self) -> Mapping[SandboxId, ChatId]:
        return dict(self.running)

    async def end_leftover(self, sandbox_id: SandboxId, chat: ChatId) -> bool:
        return self.running.pop(sandbox_id) == chat

    async def forget(self, chat: ChatId) -> None:
        self.forgotten.append(chat)

    async def use(self, chat: ChatId) -> Path:
        """A call of the chat, from which a file stays."""
        found = await self.workspaces.open(chat)
        (found.workspace / "file").write_bytes(b"x" * 100_000)
        self.ledger.note(chat, "running")
        self.ledger.used(chat)
        return found.workspace / "file"

    async def scheduled(self) -> list[str]:
        report = await self.cleaning.collect(watched_s=WATCHED_S)
        return [f"{item.kind} {item.what}" for item in report.items]


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@asynccontextmanager
async def served(
    tmp_path: Path, clock: SetClock, keep_s: float = 7 * DAY_S
) -> AsyncGenerator[Server]:
    data_root = tmp_path / "data"
    async with aclosing(SqliteStore(data_root / "sandbox" / "sessions.sqlite")) as store:
        server = Server(data_root, store, clock, keep_s)
        yield server
        await server.ledger.write()


async def test_unused_chats_go_to_the_trash_and_from_there_a_day_later(
    tmp_path: Path, clock: SetClock
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        clock.pass_(6 * DAY_S)
        kept = await server.use(NEW)
        assert await server.scheduled() == []
        clock.pass_(DAY_S)
        assert await server.scheduled() == ["workspace ann/old"]
        assert server.locked == server.forgotten == [OLD]
        assert (file.exists(), kept.exists()) == (False, True)
        states = {record.chat: record.state for record in server.ledger.all()}
        assert states == {OLD: "terminated", NEW: "running"}
        clock.pass_(DAY_S - 1)
        assert await server.scheduled() == []
        clock.pass_(WATCHED_S)
        assert await server.scheduled() == ["trash ann/old"]
        await server.cleaning.tidy()
        assert [record.chat for record in server.ledger.all()] == [NEW]
        assert list((tmp_path / "data" / "sandbox" / "trash").iterdir()) == []


async def test_a_dry_run_says_what_and_why_and_removes_nothing(
    tmp_path: Path, clock: SetClock
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        clock.pass_(8 * DAY_S)
        report = await server.cleaning.collect(dry_run=True)
        (item,) = report.items
        why = "not used for 8 days; kept for 7 days (workspace.retention)"
        assert item == GcItem("workspace", "ann/old", why, item.size_bytes)
        assert item.size_bytes >= 100_000
        assert report.dry_run
        assert file.exists()
        assert (await server.cleaning.collect()).items == (item,)
        assert not file.exists()
        clock.pass_(DAY_S)
        (item,) = (await server.cleaning.collect(dry_run=True)).items
        assert (item.kind, item.what) == ("trash", "ann/old")
        assert item.why == "discarded 1 day ago; kept for 1 day"
        assert item.size_bytes >= 100_000


async def test_a_copy_of_a_skill_goes_when_no_chat_has_it(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await to_thread.run_sync(server.snapshots.add, "ann", "sha256:0123", {"SKILL.md": b"text"})
        (item,) = (await server.cleaning.collect(dry_run=True)).items
        assert item == GcItem("skill", "ann/sha256-0123", item.why, item.size_bytes)
        assert item.why == "a copy of a skill that no chat has had for 1 day"
        copy = tmp_path / "data/sandbox/snapshots/ann/sha256-0123"
        assert copy.exists()
        await server.cleaning.tidy()
        assert not copy.exists()


async def test_what_has_a_sandbox_is_kept(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        server.used.add(OLD)
        clock.pass_(YEAR_S)
        assert (await server.cleaning.collect()).items == ()
        assert file.exists()


async def test_nothing_is_removed_without_a_retention(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock, keep_s=0) as server:
        await server.use(OLD)
        clock.pass_(YEAR_S)
        assert (await server.cleaning.collect()).items == ()


async def test_a_chat_that_is_used_while_it_is_to_be_removed_stays(
    tmp_path: Path, clock: SetClock
) -> None:
    async with served(tmp_path, clock) as server, served(tmp_path, clock) as other:
        file = await server.use(OLD)
        await server.ledger.write()
        clock.pass_(8 * DAY_S)

        @asynccontextmanager
        async def late_lock(chat: ChatId) -> AsyncGenerator[None]:
            await other.ledger.read()
            other.ledger.used(chat)
            await other.ledger.write()
            yield

        server.lock = late_lock  # type: ignore[method-assign]
        assert (await server.cleaning.collect()).items == ()
        assert file.exists()


@pytest.mark.parametrize("jump", [YEAR_S, -YEAR_S])
async def test_a_jump_of_the_clock_removes_nothing(
    tmp_path: Path, clock: SetClock, jump: float
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        await server.use(NEW)
        await server.workspaces.discard(NEW)
        await server.cleaning.tidy()
        clock.jump(jump)
        clock.pass_(WATCHED_S)
        assert await server.scheduled() == []
        assert (await server.cleaning.collect()).items == ()
    # The next server begins under the wrong clock.
    async with served(tmp_path, clock) as server:
        await server.cleaning.tidy()
        clock.pass_(WATCHED_S)
        assert await server.scheduled() == []
        assert (await server.cleaning.collect()).items == ()
        clock.jump(-jump)
        assert await server.scheduled() == []
    assert file.exists()


async def test_a_server_that_just_began_removes_nothing_by_itself(
    tmp_path: Path, clock: SetClock
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        await server.cleaning.tidy()
    clock.pass_(8 * DAY_S)
    async with served(tmp_path, clock) as server:
        assert await server.scheduled() == []
        clock.pass_(WATCHED_S)
        assert await server.scheduled() == ["workspace ann/old"]
    assert not file.exists()


async def test_a_lost_store_is_no_reason_to_remove_files(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        await server.cleaning.tidy()
    clock.pass_(8 * DAY_S)
    (tmp_path / "data" / "sandbox" / "sessions.sqlite").write_bytes(b"garbage" * 9999)
    async with served(tmp_path, clock) as server:
        await server.cleaning.tidy()
        clock.pass_(6 * DAY_S)
        assert await server.scheduled() == []
        assert [record.state for record in server.ledger.all()] == ["warm"]
        assert file.exists()
        clock.pass_(DAY_S)
        assert await server.scheduled() == ["workspace ann/old"]


async def test_a_chat_whose_files_are_gone_is_forgotten(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await server.use(OLD)
        await server.workspaces.remove(OLD)
        await server.workspaces.empty_trash(is_due=lambda _name: True)
        await server.cleaning.tidy()
        assert server.ledger.all() == []


async def test_a_sandbox_of_a_chat_without_files_is_ended(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await server.use(OLD)
        server.running = {SandboxId("mcs-1"): OLD, SandboxId("mcs-2"): NEW}
        expected = GcItem("sandbox", "ann/new", "runs for a chat that has no files", 0)
        assert (await server.cleaning.collect(dry_run=True)).items == (expected,)
        assert len(server.running) == 2
        assert (await server.cleaning.collect()).items == (expected,)
        assert server.running == {SandboxId("mcs-1"): OLD}
