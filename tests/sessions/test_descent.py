"""An older copy of a data root never beats a newer save, on real sandboxes and a real store."""

import os
import shutil
import signal
from collections.abc import Awaitable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.workspace import directory
from tests.daemon.running import ended
from tests.rclone import BUCKET
from tests.sessions.clocks import SetClock
from tests.sessions.killed_saving import CHAT as KILLED
from tests.sessions.test_saving import CHAT, Store, read, write

pytestmark = [pytest.mark.bubblewrap, pytest.mark.s3]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


async def saved(config: Config, *texts: str, **given: Any) -> None:
    """Write and save each text in the chat, by a server that ends then."""
    async with open_manager(config, **given) as manager:
        for text in texts:
            await write(manager, text)
            await manager.backups.save(CHAT)


async def told(manager: SessionManager) -> str:
    return " ".join(await (await manager.session(CHAT)).take_notices())


async def copy(source: Path, target: Path) -> None:
    """Copy a data root as a snapshot has it: nothing runs of it elsewhere."""
    await anyio.run_process(["cp", "-a", str(source), str(target)])
    await to_thread.run_sync(partial(shutil.rmtree, target / "sandbox/run", ignore_errors=True))


def bucket(store: Store) -> Path:
    return store.folder / BUCKET / "mcp-sandbox" / str(CHAT)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("saves", [1, 7])
async def test_a_copy_in_the_place_of_its_root_goes_on_with_what_was_saved_since(
    tmp_path: Path, store: Store, *, clean: bool, saves: int
) -> None:
    config = store.config(tmp_path / "root")
    async with open_manager(config) as manager:
        await write(manager, "older")
        await manager.backups.save(CHAT)
        if clean:
            await manager.stop(CHAT)
            await manager.backups.forget_saved()
        # While its sandbox runs, or after that.
        await copy(tmp_path / "root", tmp_path / "copy")
        for number in range(saves):
            await write(manager, f"newer {number}")
            await manager.backups.save(CHAT)
    (tmp_path / "root").rename(tmp_path / "lost")
    (tmp_path / "copy").rename(tmp_path / "root")
    async with open_manager(config) as manager:
        assert await read(manager) == f"newer {saves - 1}"
        assert "files are as of" in await told(manager)
        newest, *_ = await manager.backups.list(CHAT)
        await manager.stop(CHAT)
        assert newest in await manager.backups.list(CHAT)


async def test_what_the_copy_had_not_saved_is_a_backup_before_it_gives_way(
    tmp_path: Path, store: Store
) -> None:
    first, second = store.config(tmp_path / "one"), store.config(tmp_path / "two")
    async with open_manager(first) as one:
        await write(one, "common")
        await one.backups.save(CHAT)
        await write(one, "only here")
        await copy(tmp_path / "one", tmp_path / "two")
        await write(one, "newer")
    async with open_manager(second) as two:
        assert await read(two) == "newer"
        notices = await told(two)
        assert "There are other files of this chat" in notices
        (key,) = [each.key for each in await two.backups.list(CHAT) if each.key in notices]
        await two.backups.restore(CHAT, key)
        assert await read(two) == "only here"
        assert key not in await told(two)
    async with open_manager(first) as one:
        # What a person has chosen goes for all.
        assert await read(one) == "only here"


async def test_two_servers_keep_their_lines_and_are_told_of_each_other_once(
    tmp_path: Path, store: Store
) -> None:
    first, second = (store.config(tmp_path / name, keep=2) for name in ("one", "two"))
    await saved(first, "common")
    await copy(tmp_path / "one", tmp_path / "two")
    async with open_manager(first) as one, open_manager(second) as two:
        for manager in (one, two):
            await write(manager, "mine")
        for turn in range(4):
            for manager, name in ((one, "one"), (two, "two")):
                await write(manager, f"{name} {turn}")
                await manager.backups.save(CHAT)
        names = [manager.backups._lines.server for manager in (one, two)]
        seen = [await told(one), await told(two)]
        for notices, own, other in ((seen[0], *names), (seen[1], *reversed(names))):
            assert notices.count("There are other files") == 1
            assert f"the server {other} saved" in notices
            assert own not in notices
        assert (await read(one), await read(two)) == ("one 3", "two 3")
        listed = await two.backups.list(CHAT)
        assert [sum(each.server == name for each in listed) for name in names] == [2, 2]
        theirs = next(each for each in listed if each.server == names[0])
        await two.backups.restore(CHAT, theirs.key)
        assert await read(two) == "one 3"


async def test_the_line_with_more_saves_goes_on_and_the_other_stays_a_backup(
    tmp_path: Path, store: Store
) -> None:
    first, second = store.config(tmp_path / "one"), store.config(tmp_path / "two")
    await saved(first, "common")
    await copy(tmp_path / "one", tmp_path / "two")
    async with open_manager(first) as one, open_manager(second) as two:
        await write(one, "short")
        await write(two, "3")
        await one.backups.save(CHAT)
        for _ in range(3):
            await two.backups.save(CHAT)
        await told(two)
    for config, text in ((second, "3"), (first, "3")):
        async with open_manager(config) as manager:
            assert await read(manager) == text
            assert ("There are other files" in await told(manager)) == (config is first)
            assert {"short", "3"} <= await contents(manager)


async def contents(manager: SessionManager) -> set[str]:
    """What the notes of the chat's backups say."""
    found = set[str]()
    for backup in await manager.backups.list(CHAT):
        data = b"".join([piece async for piece in manager.backups._backups.read(backup)])
        found |= {word for word in ("common", "short", "3") if f"{word}".encode() in data}
    return found


@pytest.mark.parametrize("step", ["noted", "uploaded", "stored"])
async def test_a_kill_in_a_save_leaves_a_save_of_its_own(
    tmp_path: Path, store: Store, step: str
) -> None:
    config = store.config(tmp_path / "one")
    async with open_manager(config) as one:
        await write(one, "1", KILLED)
    words = [config.model_dump_json(), step]
    killed = await ended(words, env=os.environ, module="tests.sessions.killed_saving")
    assert killed.code == -signal.SIGKILL, killed.err
    async with open_manager(config) as one:
        session = await one.session(KILLED)
        assert (await session.exec("cat note")).stdout == "2\n"
        await one.backups.save(KILLED)
        assert not await session.take_notices()
        newest, *others = await one.backups.list(KILLED)
        assert {each.key for each in others} <= {*(newest.ancestors or ())}


async def test_a_kill_in_a_first_restore_is_not_followed_by_a_beginning_without_files(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1", KILLED)
    config = store.config(tmp_path / "two")
    words = [config.model_dump_json(), "unpacked"]
    killed = await ended(words, env=os.environ, module="tests.sessions.killed_saving")
    assert killed.code == -signal.SIGKILL, killed.err
    store.strike()
    async with open_manager(config) as two:
        with pytest.raises(BackendUnavailable, match="are in a backup"):
            await read(two, KILLED)
    store.start()
    async with open_manager(config) as two:
        assert await read(two, KILLED) == "1"
        assert "There are other files" not in await told(two)


@pytest.mark.parametrize("what", ["empty", "swapped", "without the last"])
async def test_files_stay_where_the_store_lacks_their_last_save(
    tmp_path: Path, store: Store, what: str
) -> None:
    config, other = store.config(tmp_path / "one"), store.config(tmp_path / "other")
    if what == "swapped":
        await saved(other, *"12345678")
        bucket(store).rename(tmp_path / "aside")
        store.restart()
    await saved(config, "mine")
    if what == "without the last":
        for file in bucket(store).glob(
            f"{max(each.stem for each in bucket(store).glob('*.json'))}*"
        ):
            file.unlink()
    else:
        bucket(store).rename(tmp_path / "mine")
    if what == "swapped":
        (tmp_path / "aside").rename(bucket(store))
    store.restart()
    async with open_manager(config) as one:
        assert await read(one) == "mine"
        assert (await told(one)).count("is not in the object store") == 1
        await one.backups.save(CHAT)
        await write(one, "more")
    async with open_manager(config) as one:
        assert await read(one) == "more"
        assert "is not in the object store" not in await told(one)
    async with open_manager(other) as two:
        assert await read(two) == ("8" if what == "swapped" else "more")


async def test_a_clock_a_day_back_makes_no_save_older(tmp_path: Path, store: Store) -> None:
    clock, config = SetClock(), store.config(tmp_path / "one", keep=2)
    await saved(config, "1", clock=clock)
    clock.jump(-86_400)
    # Two within one moment, too.
    await saved(config, "2", "3", clock=clock)
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "3"
    async with open_manager(config) as one:
        assert await read(one) == "3"
        assert "There are other files" not in await told(one)


async def test_a_server_is_named_anew_where_its_root_was_copied(tmp_path: Path) -> None:
    def name_server(folder: Path) -> Awaitable[str]:
        return to_thread.run_sync(directory.name_server, folder)

    root, moved = tmp_path / "root", tmp_path / "moved"
    name = await name_server(root)
    assert await name_server(root) == name
    await copy(root, tmp_path / "copy")
    assert await name_server(tmp_path / "copy") != name
    root.rename(moved)
    assert await name_server(moved) == name
    (moved / "sandbox" / "server").write_text("{")
    assert await name_server(moved) != name


async def test_what_an_agent_discards_does_not_come_back(tmp_path: Path, store: Store) -> None:
    config = store.config(tmp_path / "one")
    async with open_manager(config) as one:
        await write(one, "1")
        await one.backups.save(CHAT)
        await (await one.session(CHAT)).reset(keep_files=False)
        assert await read(one) == ""
        await one.stop(CHAT)
        newest, oldest = await one.backups.list(CHAT)
        assert newest.ancestors == (oldest.key,)
        assert "There are other files" not in await told(one)
    for name in ("one", "two"):
        async with open_manager(store.config(tmp_path / name)) as manager:
            assert await read(manager) == ""


async def test_a_restored_backup_goes_on_at_its_own_server(tmp_path: Path, store: Store) -> None:
    config = store.config(tmp_path / "one")
    await saved(config, "1", "2", "3")
    async with open_manager(config) as one:
        first = (await one.backups.list(CHAT))[-1]
        await one.backups.restore(CHAT, first.key)
    async with open_manager(config) as one:
        assert await read(one) == "1"
        assert "There are other files" not in await told(one)
    with anyio.fail_after(60):
        async with open_manager(store.config(tmp_path / "two")) as two:
            assert await read(two) == "1"
