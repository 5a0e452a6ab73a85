"""Files of chats are saved to the object store, and come back on any machine."""

import json
import os
import signal
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, ProjectConfig, WorkspaceConfig
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    InvalidArgument,
    NotFound,
    StorageUnavailable,
    Unsupported,
)
from mcp_sandbox.models import ChatId, SandboxInfo, SessionStatus
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.workspace.projects import ClientFolders
from tests.conftest import configured
from tests.daemon.running import Done, ended
from tests.rclone import S3Server
from tests.sessions.killed_saving import CHAT as KILLED
from tests.sessions.killed_saving import RESTORING, SAVING

CHAT = ChatId("tester", "saved")
# What these leave on the disk, another step leaves, too.
LIKE_ANOTHER = ("noted", "saved", "unpacked", "home moved")
pytestmark = pytest.mark.bubblewrap


class Store(S3Server):
    """A real object store, whose objects are files."""

    def config(self, data_dir: Path, backend: str = "bubblewrap", **given: object) -> Config:
        storage = self.settings(**given)
        return configured(backend, data_dir).model_copy(update={"storage": storage})

    def damage(self, key: str) -> None:
        file = next(self.folder.rglob(f"{key}.tar.zst"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await holds():
            await anyio.sleep(0.02)


async def status(manager: SessionManager, chat: ChatId = CHAT) -> SessionStatus:
    return next(row for row in await manager.list() if row.chat == chat)


async def write(manager: SessionManager, text: str, chat: ChatId = CHAT) -> None:
    await (await manager.session(chat)).write_file("notes.txt", text)


async def read(manager: SessionManager, chat: ChatId = CHAT) -> str:
    return (await (await manager.session(chat)).exec("cat notes.txt")).stdout


async def test_files_come_back_on_another_machine_and_the_agent_is_told(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        session = await one.session(CHAT)
        await session.exec("echo kept > notes.txt; mkdir -p ~/.cache d/e; ln -s d l; date > ~/own")
        await session.exec("echo no > ~/.cache/file")
    async with open_manager(store.config(tmp_path / "two")) as two:
        session = await two.session(CHAT)
        result = await session.exec("cat notes.txt; ls -F . ~; ls -A ~/.cache")
        assert result.stdout.split()[:1] == ["kept"]
        assert "own" in result.stdout
        assert "no" not in result.stdout.split()
        told = await session.take_notices()
        assert any("files are as of" in text for text in told), told
        assert (await status(two)).unsaved is True


@pytest.mark.parametrize(
    "backend", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
)
async def test_a_virtual_environment_comes_back_working(
    tmp_path: Path, store: Store, backend: str
) -> None:
    async with open_manager(store.config(tmp_path / "one", backend)) as one:
        session = await one.session(CHAT)
        await session.exec("python3 -m venv --without-pip env", check=True)
        await session.exec("cd env/lib/*/site-packages && echo 'kept = 1' > kept.py", check=True)
    async with open_manager(store.config(tmp_path / "two", backend)) as two:
        session = await two.session(CHAT)
        run = "env/bin/python -c 'import sys, kept; print(sys.prefix, kept.kept)'"
        assert (await session.exec(run)).stdout == "/workspace/env 1\n"


async def test_a_person_saves_lists_and_restores(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1")
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MCP_SANDBOX_BACKEND": "bubblewrap",
        **store.variables(),
    }

    async def end(data: str, *words: str) -> Done:
        return await ended(words, env={**variables, "MCP_SANDBOX_DATA_DIR": str(tmp_path / data)})

    async def run(data: str, *words: str) -> str:
        done = await end(data, *words)
        assert done.code == 0, done.err
        return done.out

    assert "saved" in (await run("one", "ls")).splitlines()[0]
    await run("one", "backup", "save", "saved")
    rows = json.loads(await run("one", "backup", "list", "saved", "--json"))
    assert len(rows) == 2
    assert rows[0]["quiet"] is True
    assert rows[1]["key"] in await run("two", "backup", "list", "tester/saved")
    for words in (("tester/nobody",), ("tester/saved", "nothing")):
        refused = await end("two", "backup", "restore", *words)
        assert f"chat {words[0]} has no backup" in refused.err
    asked = await end("two", "backup", "restore", "tester/saved")
    assert "Replace the files of tester/saved by those of the backup made" in asked.out + asked.err
    await run("two", "backup", "restore", "tester/saved", rows[1]["key"], "--yes")
    found = tmp_path / "two" / "sandbox" / "workspace" / "tester" / "chat-saved" / "notes.txt"
    assert found.read_text() == "1"


async def test_it_is_saved_a_while_after_its_last_call(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one", after=0.1)) as one:
        await write(one, "a")

        async def is_saved() -> bool:
            return not (await status(one)).unsaved

        await until(is_saved)
        backup, *_ = await one.backups.list(CHAT)
        assert backup.quiet
        assert (await status(one)).saved_at == backup.saved_at
        await read(one)
        await (await one.session(CHAT)).read_file("notes.txt")
        await write(one, "b")

        async def is_saved_again() -> bool:
            return len(await one.backups.list(CHAT)) > 1

        await until(is_saved_again)


async def test_what_is_used_is_saved_regularly_and_says_that_it_was_not_quiet(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one", after=30, every=0.2)) as one:
        session = await one.session(CHAT)
        await session.exec("sleep 100 & echo")

        async def is_saved_twice() -> bool:
            return len(await one.backups.list(CHAT)) > 1

        await until(is_saved_twice)
        assert not any(backup.quiet for backup in await one.backups.list(CHAT))


async def test_what_is_used_during_a_save_goes_on_after_it(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        session = await one.session(CHAT)
        await session.exec("head -c 20000000 /dev/urandom > large")
        await one.stop(CHAT)

        async def is_open() -> bool:
            return (await status(one)).state == "running"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.backups.save, CHAT)
            await until(is_open)
            store.strike(signal.SIGSTOP)
            await session.exec("echo here > /tmp/note")
            store.strike(signal.SIGCONT)
        assert (await session.exec("cat /tmp/note")).stdout == "here\n"
        await one.stop(CHAT)
        await one.backups.save(CHAT)
        assert not await is_open()


async def test_older_files_of_this_machine_go_to_the_trash(tmp_path: Path, store: Store) -> None:
    first, second = store.config(tmp_path / "one"), store.config(tmp_path / "two")
    async with open_manager(first) as one:
        await write(one, "1")
    async with open_manager(second) as two:
        assert await read(two) == "1"
        await write(two, "2")
    async with open_manager(first) as one:
        assert await read(one) == "2"
        await write(one, "3")
    async with open_manager(second) as two:
        assert await read(two) == "3"
    trash = list((tmp_path / "one" / "sandbox" / "trash").glob("*/workspace/notes.txt"))
    assert [file.read_text() for file in trash] == ["1"]


async def test_damaged_backups_are_passed_over(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        for text in ("1", "2", "3"):
            await write(one, text)
            await one.backups.save(CHAT)
        newest, middle, _ = await one.backups.list(CHAT)
    store.damage(newest.key)
    store.damage(middle.key)
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "1"
        told = await (await two.session(CHAT)).take_notices()
        assert sum("could not be restored" in text for text in told) == 2


async def test_holes_of_a_file_count_for_nothing(tmp_path: Path, store: Store) -> None:
    def small(name: str) -> Config:
        space = WorkspaceConfig(size_limit=32 << 20)
        return store.config(tmp_path / name).model_copy(update={"workspace": space})

    async with open_manager(small("one")) as one:
        await (await one.session(CHAT)).exec("truncate -s 200M large; echo end >> large")
    async with open_manager(small("two")) as two:
        seen = await (await two.session(CHAT)).exec("stat -c %s large; tail -c 4 large")
        assert seen.stdout == f"{(200 << 20) + 4}\nend\n"


async def test_files_that_have_no_room_are_not_replaced_by_none(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await (await one.session(CHAT)).exec("head -c 3000000 /dev/urandom > large")
    space = WorkspaceConfig(size_limit=2 << 20)
    settings = store.config(tmp_path / "two").model_copy(update={"workspace": space})
    async with open_manager(settings) as two:
        with pytest.raises(BackendUnavailable, match=r"larger than workspace\.size_limit"):
            await read(two)
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert (await (await two.session(CHAT)).exec("stat -c %s large")).stdout == "3000000\n"


async def test_a_chat_that_is_too_large_to_save_is_told(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one", max_size=1 << 20)) as one:
        session = await one.session(CHAT)
        await session.exec("truncate -s 2M large")
        await one.stop(CHAT)
        await one.stop(CHAT)
        told = [text for text in await session.take_notices() if "not backed up" in text]
        assert len(told) == 1
        assert "storage.max_size" in told[0]


async def test_a_restore_that_fails_is_not_done_later(tmp_path: Path, store: Store) -> None:
    settings = store.config(tmp_path / "one")
    few = settings.sessions.model_copy(update={"max_open": 1, "queue_wait": 0})
    async with open_manager(settings.model_copy(update={"sessions": few})) as one:
        await write(one, "1")
        await one.backups.save(CHAT)
        await write(one, "2")
        await one.stop(CHAT)
        async with busy(await one.session(ChatId("tester", "other"))):
            with pytest.raises(CapacityReached):
                await one.backups.restore(CHAT)
        assert await read(one) == "2"


@asynccontextmanager
async def busy(session: Session) -> AsyncGenerator[None]:
    """A call that has begun and goes on during the block."""
    begun = anyio.Event()

    async def show(_: str, __: bytes) -> None:
        begun.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(session.exec, "echo begun; sleep 100", on_output=show))
        await begun.wait()
        yield
        tasks.cancel_scope.cancel()


async def test_if_all_are_damaged_the_files_stay(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1")
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "1"
        await write(two, "2")
        await two.backups.save(CHAT)
        for backup in await two.backups.list(CHAT):
            store.damage(backup.key)
    async with open_manager(store.config(tmp_path / "one")) as one:
        assert await read(one) == "1"


async def test_without_the_store_calls_go_on_and_all_is_saved_when_it_is_back(
    tmp_path: Path, store: Store
) -> None:
    settings = store.config(tmp_path / "one", after=0.1, every=0.5)
    async with open_manager(settings) as one:
        await write(one, "1")
        await one.backups.save(CHAT)
        store.strike()
        await write(one, "2")
        with pytest.raises(StorageUnavailable):
            await one.backups.save(CHAT)
        await one.stop(CHAT)
        assert await read(one) == "2"
        assert (await status(one)).unsaved
        assert one.statistics().unsaved == 1
    async with open_manager(settings) as one:
        assert await read(one) == "2"
        assert "could not be asked" in " ".join(await (await one.session(CHAT)).take_notices())
        await one.stop(CHAT)
    async with open_manager(settings) as one:
        store.start()

        async def is_saved() -> bool:
            return not (await status(one)).unsaved

        await until(is_saved)
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "2"


async def test_files_that_only_the_store_has_are_never_replaced_by_none(
    tmp_path: Path, store: Store
) -> None:
    settings = store.config(
        tmp_path / "one",
    )
    async with open_manager(settings) as one:
        await write(one, "1")
        await one.stop(CHAT)
        folder = tmp_path / "one" / "sandbox" / "workspace" / CHAT.user
        folder.rename(tmp_path / "elsewhere")
        store.strike()
        with pytest.raises(BackendUnavailable, match="does not answer"):
            await read(one)
        store.start()
        await until(lambda: readable(one))
        assert await read(one) == "1"


async def readable(manager: SessionManager) -> bool:
    try:
        await read(manager)
    except BackendUnavailable:
        return False
    return True


async def test_an_older_backup_is_put_back_by_hand(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        for text in ("1", "2"):
            await write(one, text)
            await one.backups.save(CHAT)
        await write(one, "3")
        _, oldest = await one.backups.list(CHAT)
        await one.backups.restore(CHAT, oldest.key)
        assert await read(one) == "1"
        assert len(await one.backups.list(CHAT)) == 3
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "1"


async def test_retention_spares_what_is_not_saved(tmp_path: Path, store: Store) -> None:
    settings = store.config(tmp_path / "one")
    space = settings.workspace.model_copy(update={"retention": 1e-6})
    settings = settings.model_copy(update={"workspace": space})
    async with open_manager(settings) as one:
        await write(one, "1")
        store.strike()
        await one.stop(CHAT)
    async with open_manager(settings) as one:
        assert (await one.collect()).items == ()
        store.start()
        await one.backups.save(CHAT)
        assert [item.what for item in (await one.collect()).items] == [str(CHAT)]
        assert await read(one) == "1"


async def test_a_removed_chat_begins_anew(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1")
        await one.backups.save(CHAT)
        await one.remove(CHAT)
        assert await one.backups.list(CHAT) == []
        assert await read(one) == ""


def download(address: str) -> bytes:
    with urllib.request.urlopen(address) as answer:
        return answer.read()  # type: ignore[no-any-return]


async def test_a_file_is_shared(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "for all")
        session = await one.session(CHAT)
        address = await session.share("notes.txt", expires_s=60)
        assert await to_thread.run_sync(download, address) == b"for all"
        with pytest.raises(NotFound, match="nothing"):
            await session.share("nothing.txt")
        with pytest.raises(InvalidArgument, match="a day"):
            await session.share("notes.txt", expires_s=86401)


async def test_without_a_store_nothing_is_said_of_it(tmp_path: Path) -> None:
    async with open_manager(configured("bubblewrap", tmp_path)) as one:
        await write(one, "1")
        assert (await status(one)).unsaved is False
        assert one.statistics().unsaved is None
        with pytest.raises(Unsupported, match=r"storage\.endpoint"):
            await one.backups.save(CHAT)
        with pytest.raises(Unsupported, match="storage"):
            await (await one.session(CHAT)).share("notes.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=pytest.mark.whole if step in LIKE_ANOTHER else ())
        for step in SAVING + RESTORING
    ],
)
async def test_a_kill_at_any_step_loses_no_file_and_shows_no_half(
    tmp_path: Path, store: Store, step: str
) -> None:
    settings: dict[str, Any] = {"keep": 1, "after": 0.2}
    first, second = (store.config(tmp_path / name, **settings) for name in ("one", "two"))
    if step == "thrown away":
        async with open_manager(second) as two:
            await (await two.session(KILLED)).exec("echo 0 > note; echo 0 > ~/note")
    async with open_manager(first) as one:
        await (await one.session(KILLED)).exec("echo 1 > note; echo 1 > ~/note")
        await one.backups.save(KILLED)
    struck = first if step in SAVING else second
    arguments = [struck.model_dump_json(), step]
    killed = await ended(arguments, env=os.environ, module="tests.sessions.killed_saving")
    assert killed.code == -signal.SIGKILL, killed.err
    wanted = "2\n2\n" if step in SAVING else "1\n1\n"
    async with open_manager(struck) as again:
        seen = await (await again.session(KILLED)).exec("cat note ~/note; ls -A")
        assert seen.stdout == f"{wanted}note\n"

        async def is_saved_and_pruned() -> bool:
            saved = not (await status(again, KILLED)).unsaved
            return saved and len(await again.backups.list(KILLED)) == 1

        await until(is_saved_and_pruned)
    assert not list((struck.data_dir / "sandbox" / "restoring").glob("*/*/*"))
    async with open_manager(store.config(tmp_path / "three")) as three:
        seen = await (await three.session(KILLED)).exec("cat note ~/note; ls -A")
        assert seen.stdout == f"{wanted}note\n"
    with anyio.fail_after(30):
        while await running(struck):
            await anyio.sleep(0.1)


async def test_a_call_that_ends_while_a_save_waits_is_saved_by_it(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one", after=3600)) as one:
        await write(one, "1")
        session, places = await one.session(CHAT), one.backups._places
        places.total_tokens, most = 0, places.total_tokens
        async with anyio.create_task_group() as saving:
            async with anyio.create_task_group() as calling:
                calling.start_soon(session.exec, "until [ -e end ]; do sleep 0.02; done")

                async def is_waiting() -> bool:
                    return places.statistics().tasks_waiting == 1

                async def is_called() -> bool:
                    return (await status(one)).busy == 1

                await until(is_called)
                saving.start_soon(one.backups.save, CHAT)
                await until(is_waiting)
                await session.write_file("end", "")
            places.total_tokens = most
        assert not (await status(one)).unsaved


async def running(config: Config) -> Sequence[SandboxInfo]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        return await backend.running()


@pytest.mark.docker
async def test_a_paused_chat_is_saved_and_stays_paused(tmp_path: Path, store: Store) -> None:
    async with open_manager(store.config(tmp_path / "one", "docker", after=0.2)) as one:
        await write(one, "1")
        store.strike()
        assert await one.pause(CHAT)
        assert (await status(one)).unsaved
        store.start()

        async def is_saved() -> bool:
            return not (await status(one)).unsaved

        await until(is_saved)

        async def is_paused() -> bool:
            return (await status(one)).state == "paused"

        await until(is_paused)
        assert len(await one.backups.list(CHAT)) == 1
        await one.stop(CHAT)


@pytest.mark.slow
async def test_a_store_that_hangs_holds_up_no_stop_and_no_opening_for_long(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1")
        store.strike(signal.SIGSTOP)
        try:
            with anyio.fail_after(15):
                await one.stop(CHAT)
            with anyio.fail_after(3):
                assert await read(one) == "1"
        finally:
            store.strike(signal.SIGCONT)
        assert (await status(one)).unsaved


async def test_a_copy_of_the_project_comes_back_as_the_chat_left_it(
    tmp_path: Path, store: Store
) -> None:
    project, folders = tmp_path / "project", ClientFolders()
    project.mkdir()
    (project / "file").write_text("first\n")
    copied = {"project": ProjectConfig(access="copy")}
    with folders.bring(CHAT, project):
        for data, expected in (("one", "first\n"), ("two", "second\n")):
            config = store.config(tmp_path / data).model_copy(update=copied)
            async with open_manager(config, folders) as server:
                session = await server.session(CHAT)
                seen = await session.exec("cat /project/file; echo second > /project/file")
                assert seen.stdout == expected
    assert (project / "file").read_text() == "first\n"
