"""A chat whose sandbox alone holds its files loses none of them, and is told if it did."""

import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, LimitsConfig
from mcp_sandbox.errors import BackendUnavailable, Busy, ConfigError, Unsaved, WorkspaceFull
from mcp_sandbox.models import ChatId, Packed, SandboxInfo
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.sandbox.context import OpenSandbox
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.storage.backups import NewSave
from mcp_sandbox.storage.objects import Take
from tests.holding import HoldingBackend, holding_files
from tests.rclone import S3Server
from tests.sessions.clocks import SetClock
from tests.sessions.sandbox.killed_holding import STEPS, try_kill

CHAT = ChatId("tester", "held")
pytestmark = [pytest.mark.bubblewrap, pytest.mark.s3]


@pytest.fixture(autouse=True)
def holding() -> Iterator[None]:
    with holding_files():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "s3" / "buckets")
    yield server
    server.strike(18)
    server.close()


@pytest.fixture
def config(tmp_path: Path, store: S3Server) -> Config:
    return Config(data_dir=tmp_path / "data", backend="unsafe-local", storage=store.settings())


@pytest.fixture
async def manager(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as opened:
        yield opened


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    return await manager.session(CHAT)


async def sandboxes(config: Config) -> list[SandboxInfo]:
    async with open_backend("unsafe-local", config) as backend:
        return [*await backend.running()]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await holds():
            await anyio.sleep(0.02)


async def held_folder(config: Config) -> Path:
    ((info,), root) = await sandboxes(config), config.data_dir / "held"
    return root / info.id


async def test_files_come_back_in_a_new_sandbox_and_none_lie_on_the_host(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("echo kept > file; echo own > ~/own; ln -s file link; date > ~/.cache-not")
    assert await manager.stop(CHAT)
    assert not await sandboxes(config)
    assert (await session.exec("cat link ~/own")).stdout == "kept\nown\n"
    assert any("files are as of" in text for text in await session.take_notices())
    assert not list(config.data_dir.glob("sandbox/workspace/*/*"))


async def test_one_that_cannot_be_saved_is_paused_told_of_and_ended_later(
    manager: SessionManager, session: Session, config: Config, store: S3Server
) -> None:
    await session.exec("echo kept > file")
    store.strike()
    with pytest.raises(Unsaved, match="could not be saved"):
        await manager.stop(CHAT)
    assert [info.state for info in await sandboxes(config)] == ["paused"]
    assert (await session.exec("cat file")).stdout == "kept\n"
    assert any("could not be saved" in text for text in await session.take_notices())
    store.start()

    async def is_ended() -> bool:
        try:
            return await manager.stop(CHAT)
        except Unsaved:
            return False

    await until(is_ended)
    assert not await sandboxes(config)
    assert (await session.exec("cat file")).stdout == "kept\n"


async def test_by_force_it_ends_without_being_saved(
    manager: SessionManager, session: Session, config: Config, store: S3Server
) -> None:
    await session.exec("echo lost > file")
    store.strike()
    assert await manager.stop(CHAT, force=True)
    assert not await sandboxes(config)
    store.start()

    async def answers() -> bool:
        try:
            return not (await session.exec("ls")).stdout
        except BackendUnavailable:
            return False

    await until(answers)
    assert any("they are lost" in text for text in await session.take_notices())


async def test_a_server_that_goes_while_the_store_is_away_leaves_it_for_the_next(
    config: Config, store: S3Server
) -> None:
    async with open_manager(config) as first:
        await (await first.session(CHAT)).exec("echo kept > file")
        store.strike()
    assert len(await sandboxes(config)) == 1
    store.start()
    soon = store.settings(after=0.2, every=0.2)
    async with open_manager(config.model_copy(update={"storage": soon})) as second:

        async def is_ended() -> bool:
            return not await sandboxes(config)

        await until(is_ended)
        session = await second.session(CHAT)
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_full_sandbox_takes_no_more(config: Config) -> None:
    space = config.workspace.model_copy(update={"size_limit": 8 << 20})
    async with open_manager(config.model_copy(update={"workspace": space})) as manager:
        session = await manager.session(CHAT)
        await session.write_file("large", os.urandom(7 << 20))
        with pytest.raises(WorkspaceFull):
            await session.write_file("larger", os.urandom(7 << 20))
        assert (await manager.size(CHAT) or 0) > 7 << 20


async def test_a_chat_that_begins_anew_keeps_its_home(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("mkdir -p a/b; echo 1 > a/b/c; echo kept > ~/own")
    await session.reset(keep_files=False)
    assert (await session.exec("find . -mindepth 1; cat ~/own")).stdout == "kept\n"


# Leaves no process to anybody: the runner's free workers are killed, too.
_BOMB = """
import os, signal, sys, time
from contextlib import suppress
parent_of = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
worker = os.getppid()
if sys.argv[1] == "left" and os.fork():
    os._exit(0)
if not os.fork():
    while True:
        with suppress(OSError):
            os.fork() or signal.pause()
time.sleep(0.3)
runner = parent_of(worker)
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    with suppress(OSError):
        if pid != worker and parent_of(pid) == runner:
            os.kill(pid, signal.SIGKILL)
time.sleep(0.1)
open("full", "w")
signal.pause()
"""


@pytest.mark.parametrize(("bomb", "keep_files"), [("goes on", True), ("left", False)])
async def test_one_without_room_for_a_process_is_saved_and_ended(
    config: Config, bomb: str, keep_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any look at the files would end what was left.
    monkeypatch.setattr(Files, "measure", AsyncMock(side_effect=Busy()))
    few = config.model_copy(update={"limits": LimitsConfig(pids=64)})
    async with open_manager(few) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file; echo kept > ~/own")
        await session.exec(["python3", "-c", _BOMB, bomb], wait_s=0)
        full = (await held_folder(config)) / "workspace" / "full"

        async def is_full() -> bool:
            return full.exists()

        await until(is_full)
        await session.reset(keep_files=keep_files)
        found = (await session.exec("cat file ~/own")).stdout
        assert found == "kept\n" * (1 + keep_files)


async def test_one_whose_connection_is_lost_is_not_ended_unsaved(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.exec("echo kept > file")
    monkeypatch.setattr(OpenSandbox, "make_room", lambda held: held.runtime.aclose())
    with pytest.raises(Unsaved):
        await session.reset()
    assert (await session.exec("cat file")).stdout == "kept\n"


async def marked(config: Config, mark: str) -> Path:
    """The folder of the only sandbox, whose files say that they are of another chat or time."""
    folder = await held_folder(config)
    await anyio.Path(folder / "home" / ".~mcp-chat").write_text(mark)
    return folder


async def test_files_of_another_chat_are_left_alone(config: Config) -> None:
    async with open_manager(config) as manager:
        await (await manager.session(CHAT)).exec("echo theirs > file")
        folder = await marked(config, "tester/another 1")
        held = manager._hold(CHAT)._held
        assert held
        await held.runtime.aclose()
        session = await manager.session(CHAT)
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="not marked as the chat's"):
                await session.exec("true")
        assert (folder / "workspace" / "file").read_text() == "theirs\n"
        assert await manager.stop(CHAT, force=True)
        assert (await session.exec("ls")).stdout == ""


@pytest.mark.parametrize("left", ["", "; echo new > file"])
async def test_a_chat_that_deletes_all_it_can_goes_on_with_that(
    session: Session, manager: SessionManager, left: str
) -> None:
    await session.exec("echo old > file")
    await manager.backups.save(CHAT)
    await session.exec(f"find /workspace /home/sandbox -mindepth 1 -delete{left}")
    held = manager._hold(CHAT)._held
    assert held
    await held.runtime.aclose()
    assert (await session.exec("cat *")).stdout == left[7:10] + "\n" * bool(left)


async def test_older_files_are_saved_as_such_and_the_newest_restored(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("echo newest > file")
    await manager.backups.save(CHAT)
    await session.exec("echo old > file")
    await marked(config, f"{CHAT} 5")
    held = manager._hold(CHAT)._held
    assert held
    await held.runtime.aclose()
    assert (await session.exec("cat file")).stdout == "newest\n"
    assert [each.epoch for each in await manager.backups.list(CHAT)][1:] == [5]


async def test_retention_removes_backups_but_no_sandbox_with_unsaved_files(
    config: Config, store: S3Server
) -> None:
    space = config.workspace.model_copy(update={"retention": 1e-6})
    config = config.model_copy(update={"workspace": space})
    other = ChatId("tester", "unsaved")
    async with open_manager(config) as manager:
        for chat in (CHAT, other):
            await (await manager.session(chat)).exec("echo kept > file")
        await manager.stop(CHAT)
        await manager.saving.forget_saved()  # type: ignore[union-attr]
        report = await manager.collect()
        assert [item.what for item in report.items] == [str(CHAT)]
        assert not await manager.backups.list(CHAT)
        assert not (await manager.status(CHAT))
        assert (await (await manager.session(other)).exec("cat file")).stdout == "kept\n"


async def test_what_is_discarded_while_no_sandbox_runs_does_not_come_back(
    manager: SessionManager, session: Session
) -> None:
    await session.exec("echo discarded > file")
    await manager.backups.save(CHAT)
    await manager.stop(CHAT)
    await session.reset(keep_files=False)
    assert (await session.exec("ls")).stdout == ""


@pytest.mark.parametrize("saves", [0, 1])
async def test_the_retention_of_a_copied_root_removes_nothing_of_the_server_that_lives(
    config: Config, tmp_path: Path, saves: int
) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file")
        await manager.stop(CHAT)
        await manager.backups.forget_saved()
        records = config.data_dir / "sandbox" / "records"
        await to_thread.run_sync(shutil.copytree, records, tmp_path / "copy/sandbox/records")
        for _ in range(saves):
            await manager.backups.save(CHAT)
        listed = await manager.backups.list(CHAT)
        space = config.workspace.model_copy(update={"retention": 1e-6})
        copied = {"data_dir": tmp_path / "copy", "workspace": space}
        async with open_manager(config.model_copy(update=copied)) as copy:
            assert [item.what for item in (await copy.collect()).items] == [str(CHAT)]
            assert not await copy.status(CHAT)
        assert await manager.backups.list(CHAT) == listed
        assert (await session.exec("cat file")).stdout == "kept\n"


@pytest.mark.parametrize("known", [True, False])
async def test_what_another_server_saved_since_is_gone_on_with_and_this_is_a_backup(
    manager: SessionManager, session: Session, config: Config, known: bool
) -> None:
    await session.exec("echo common > file")
    await manager.backups.save(CHAT)
    common, *_ = await manager.backups.list(CHAT)
    elsewhere = config.model_copy(update={"data_dir": config.data_dir.with_name("elsewhere")})
    await session.exec("echo only here > file")
    if known:
        async with open_manager(elsewhere) as other:
            await (await other.session(CHAT)).exec("echo newer > file")
    else:
        # It says nothing of what is here: so this stays.
        new = NewSave(common.epoch + 9, common.saved_at)
        data = manager.backups._backups.read(common)
        await manager.backups._backups.save(CHAT, new, partial(passed, data), quiet=lambda: True)
    held = manager._hold(CHAT)._held
    assert held
    await held.runtime.aclose()
    seen = (await session.exec("cat file")).stdout
    assert seen == ("newer\n" if known else "only here\n")
    told = [text for text in await session.take_notices() if "There are other files" in text]
    assert len(told) == 1
    await manager.stop(CHAT)
    (here,) = [
        each.key
        for each in await manager.backups.list(CHAT)
        if each.ancestors == (common.key,) and each.server == manager.backups._lines.server
    ]
    if known:
        assert here in told[0]
        await manager.backups.restore(CHAT, here)
        assert (await session.exec("cat file")).stdout == "only here\n"


async def passed(data: AsyncGenerator[bytes], take: Take) -> Packed:
    async for piece in data:
        await take(piece)
    return Packed(1, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"storage": {}}, "set storage.endpoint"),
        ({"workspace": {"aliases": ["/data"]}}, "workspace.aliases"),
        ({"project": {"access": "ro"}}, "project.access"),
        ({"network": "allowlist"}, "network: allowlist"),
    ],
)
async def test_what_it_cannot_have_is_refused_in_words(
    config: Config, given: dict[str, object], said: str
) -> None:
    whole = {**config.model_dump(exclude={"fleet", "storage"}), "storage": config.storage, **given}
    with pytest.raises(ConfigError, match=said):
        async with open_manager(Config.model_validate(whole)):
            pass


async def test_a_chat_is_paused_and_goes_on(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("echo kept > file")
    assert await manager.pause(CHAT)
    assert [info.state for info in await sandboxes(config)] == ["paused"]
    assert (await session.exec("cat file")).stdout == "kept\n"
    assert await manager.pause(CHAT)
    assert await manager.resume(CHAT)
    assert (await session.exec("cat file")).stdout == "kept\n"
    # Each of the two has ended what was in /tmp.
    told = await session.take_notices()
    assert ["it was paused, which ends what runs in it" in text for text in told] == [True, True]


async def test_a_server_that_never_had_it_open_saves_it_before_it_ends_it(
    config: Config, store: S3Server
) -> None:
    async with open_manager(config) as first:
        await (await first.session(CHAT)).exec("echo kept > file")
        store.strike()
    store.start()
    async with open_manager(config) as second:
        assert await second.stop(CHAT)
        assert not await sandboxes(config)
        assert (await (await second.session(CHAT)).exec("cat file")).stdout == "kept\n"


async def test_where_a_paused_one_keeps_its_files_an_idle_one_is_paused_until_retention(
    config: Config, store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HoldingBackend, "keeps_paused_files", True)
    clock = SetClock()
    async with open_manager(config, clock=clock) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file")
        (first,) = await sandboxes(config)
        store.strike()
        for pass_s in (config.sessions.remove_after, config.sessions.lifetime):
            clock.pass_(pass_s)
            await manager._reaper.look()
            assert [(info.id, info.state) for info in await sandboxes(config)] == [
                (first.id, "paused")
            ]
            assert (await session.exec("cat file")).stdout == "kept\n"
        assert not await session.take_notices()
        store.start()
        clock.pass_(60)
        await manager.backups.save(CHAT)
    space = config.workspace.model_copy(update={"retention": 1e-6})
    async with open_manager(config.model_copy(update={"workspace": space})) as manager:
        assert [item.what for item in (await manager.collect()).items] == [str(CHAT)]
        assert not await sandboxes(config)
        assert not await manager.backups.list(CHAT)


@pytest.mark.parametrize("by", ["a call", "gc"])
async def test_one_of_a_lost_record_is_taken_over_and_ended_once_it_is_saved(
    config: Config, store: S3Server, by: str
) -> None:
    async with open_manager(config) as first:
        await (await first.session(CHAT)).exec("echo kept > file")
        store.strike()
    store.start()
    for path in config.data_dir.glob("sandbox/records/*/*"):
        path.unlink()
    clock = SetClock()
    async with open_manager(config, clock=clock) as second:
        session = await second.session(CHAT)
        if by == "gc":
            await second.collect()
        else:
            assert (await session.exec("cat file")).stdout == "kept\n"
        await second._reaper.look()
        clock.pass_(config.sessions.remove_after)
        await second._reaper.look()
        assert not await sandboxes(config)
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_one_whose_chat_another_server_has_now_is_kept(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("echo unsaved > file")
    await manager._hold(CHAT).let_go("another server has the chat", lost=True)
    assert [info.state for info in await sandboxes(config)] == ["paused"]


@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_at_any_step_loses_no_write_and_leaves_no_sandbox(
    config: Config, step: int
) -> None:
    await try_kill("holding", config, step)
