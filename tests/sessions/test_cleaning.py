"""Old files go through the trash; what is used stays, whatever clocks and stores do."""

import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mcp_sandbox.audit import Audit
from mcp_sandbox.config import AuditConfig, ProjectConfig, WorkspaceConfig
from mcp_sandbox.config.values import DAY_S
from mcp_sandbox.models import BackendName, ChatId, SandboxId, SandboxInfo
from mcp_sandbox.sessions.chat_records import CONTROL, ChatRecord, ChatRecords, UseTimes
from mcp_sandbox.sessions.cleaning import Cleaner, GcItem
from mcp_sandbox.sessions.sandbox.context import SessionContext
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.projects import ClientFolders, Projects
from mcp_sandbox.workspace.retention import WATCHED_S
from mcp_sandbox.workspace.users import SandboxUsers
from tests.sessions.clocks import NOON, SetClock

OWNER = (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=OWNER)
OLD, NEW = ChatId("ann", "old"), ChatId("ann", "new")
YEAR_S = 365 * DAY_S


class Engine:
    """What a backend says of the sandboxes that a test lets run."""

    name: BackendName = "docker"
    keeps_paused_files = False

    def __init__(self) -> None:
        self.sandboxes: list[SandboxInfo] = []

    def run(self, name: str, chat: ChatId) -> None:
        labels = {"user": chat.user, "chat": chat.chat}
        self.sandboxes.append(SandboxInfo(SandboxId(name), labels))

    def pause(self) -> None:
        self.sandboxes = [replace(one, state="paused") for one in self.sandboxes]

    async def running(self) -> Sequence[SandboxInfo]:
        return list(self.sandboxes)

    async def destroy(self, sandbox_id: SandboxId) -> None:
        self.sandboxes = [one for one in self.sandboxes if one.id != sandbox_id]


class Server:
    """What one server of the data root knows, and does about old files."""

    def __init__(self, data_root: Path, clock: SetClock, keep_s: float) -> None:
        self.used: set[ChatId] = set()
        self.engine = Engine()
        self.workspaces = Workspaces(data_root, users=USERS, now=lambda: clock().wall_s)
        self.records = ChatRecords(data_root)
        self.ledger = UseTimes(self.records, clock)
        rooms = SessionContext(
            # Which sandboxes run is what each test says.
            backend=self.engine,  # type: ignore[arg-type]
            workspaces=self.workspaces,
            projects=Projects(ProjectConfig(), self.workspaces, ClientFolders()),
            use_times=self.ledger,
            audit=Audit(data_root, AuditConfig(enabled=False)),
            settings=SessionSettings(workspace=WorkspaceConfig(retention=keep_s)),
            ways_out=None,  # type: ignore[arg-type]
        )
        self.cleaning = Cleaner(rooms, lambda: self.used, self.adopt)

    async def use(self, chat: ChatId) -> Path:
        """A call of the chat, from which a file stays."""
        found = await self.workspaces.open(chat)
        (found.workspace / "file").write_bytes(b"x" * 100_000)
        if await self.records.get(chat) is None:
            now_s = self.ledger.clock().wall_s
            await self.records.put(ChatRecord(chat, "docker", now_s, now_s))
        self.ledger.note_use(chat)
        return found.workspace / "file"

    async def adopt(self, chat: ChatId, sandbox_id: SandboxId) -> None:
        raise AssertionError("these sandboxes show folders of the host")

    async def known(self) -> list[ChatId]:
        return [record.chat for record in await self.records.list()]

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
    server = Server(data_root, clock, keep_s)
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
        assert (file.exists(), kept.exists()) == (False, True)
        assert await server.known() == [NEW]
        clock.pass_(DAY_S - 1)
        assert await server.scheduled() == []
        clock.pass_(WATCHED_S)
        assert await server.scheduled() == ["trash ann/old"]
        await server.cleaning.tidy()
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

        class Used(ChatRecords):
            @asynccontextmanager
            async def hold(self, chat: ChatId, *, at_once: bool = False) -> AsyncGenerator[bool]:
                other.ledger.note_use(chat)
                await other.ledger.write()
                async with super().hold(chat, at_once=at_once) as ours:
                    yield ours

        server.cleaning._records = Used(tmp_path / "data")
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


@pytest.mark.parametrize("ruin", ["garbage", "gone"])
async def test_a_lost_record_is_no_reason_to_remove_files(
    tmp_path: Path, clock: SetClock, ruin: str
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        await server.cleaning.tidy()
    clock.pass_(8 * DAY_S)
    note = tmp_path / "data/sandbox/records/ann/chat-old.json"
    note.unlink()
    if ruin == "garbage":
        note.write_bytes(b"garbage" * 9999)
        os.utime(note, (clock().wall_s, clock().wall_s))
    async with served(tmp_path, clock) as server:
        await server.cleaning.tidy()
        clock.pass_(6 * DAY_S)
        assert await server.scheduled() == []
        assert await server.known() == [OLD]
        assert file.exists()
        clock.pass_(DAY_S)
        assert await server.scheduled() == ["workspace ann/old"]


async def test_a_clock_file_that_is_damaged_is_set_aside_and_removes_nothing(
    tmp_path: Path, clock: SetClock
) -> None:
    async with served(tmp_path, clock) as server:
        file = await server.use(OLD)
        await server.cleaning.tidy()
    noted = tmp_path / "data/sandbox/clock"
    for ruin in (b"", b"\xff\xfe", b"{}", b'{"boot": 3}', b"[1]", b'{"wall_s": "x"}'):
        noted.write_bytes(ruin)
        async with served(tmp_path, clock) as server:
            clock.pass_(WATCHED_S)
            assert await server.scheduled() == []
            assert json.loads(noted.read_bytes())["wall_s"] == clock().wall_s
    noted.unlink()
    noted.mkdir()
    async with served(tmp_path, clock) as server:
        assert await server.scheduled() == []
    assert noted.is_file()
    assert file.exists()


async def test_a_chat_whose_files_are_gone_is_forgotten(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await server.use(OLD)
        await server.workspaces.remove(OLD)
        await server.workspaces.empty_trash(is_due=lambda _name: True)
        await server.cleaning.tidy()
        assert await server.known() == []


@pytest.mark.parametrize(
    ("name", "value", "lasts_s"),
    [
        (CONTROL, {"project": None}, 7 * DAY_S),
        ("memory", {"runs": 1, "until_s": 0}, 7 * DAY_S),
        ("assistant", {"name": "writer"}, 7 * DAY_S),
        ("approvals", [{"state": "open", "until_s": NOON + 3600}], 3600),
        ("approvals", [{"state": "no", "until_s": NOON}, {"until_s": NOON + 600}], 600),
        ("egress", [{"host": "a.example", "until_s": NOON + 30 * DAY_S}], 30 * DAY_S),
        ("egress", [], 0),
    ],
)
async def test_what_is_kept_of_a_chat_without_files_lasts_until_it_is_over(
    tmp_path: Path, clock: SetClock, name: str, value: object, lasts_s: float
) -> None:
    async with served(tmp_path, clock) as server:
        await server.records.keep(OLD, name, lambda _: value, clock().wall_s)
        clock.pass_(max(0, lasts_s - 1))
        await server.cleaning.tidy()
        assert await server.known() == ([OLD] if lasts_s else [])
        clock.pass_(2)
        await server.cleaning.tidy()
        assert await server.known() == []


async def test_what_is_paused_for_long_is_ended(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await server.use(OLD)
        server.engine.run("mcs-1", OLD)
        server.engine.pause()
        clock.pass_(3599)
        await server.cleaning.end_left()
        assert (await server.cleaning.collect()).items == ()
        clock.pass_(1)
        why = "paused, and not used for 1 hour (sessions.remove_after)"
        expected = GcItem("sandbox", "ann/old", why, 0)
        assert (await server.cleaning.collect(dry_run=True)).items == (expected,)
        assert len(server.engine.sandboxes) == 1
        await server.cleaning.end_left()
        assert server.engine.sandboxes == []


async def test_a_sandbox_of_a_chat_without_files_is_ended(tmp_path: Path, clock: SetClock) -> None:
    async with served(tmp_path, clock) as server:
        await server.use(OLD)
        server.engine.run("mcs-1", OLD)
        server.engine.run("mcs-2", NEW)
        expected = GcItem("sandbox", "ann/new", "runs for a chat that has no files", 0)
        assert (await server.cleaning.collect(dry_run=True)).items == (expected,)
        assert len(server.engine.sandboxes) == 2
        assert (await server.cleaning.collect()).items == (expected,)
        assert [one.id for one in server.engine.sandboxes] == ["mcs-1"]
