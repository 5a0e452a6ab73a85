"""An object store that fails in the midst of a transfer: it is told, in time, and nothing is half.

Large bodies fail on their way, as a line does it; what is small arrives. An object store may take
20 s for each part of 5 MiB, here half a second.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.errors import BackendUnavailable, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.storage import objects
from tests.rclone import FaultyLine
from tests.sessions.test_saving import CHAT, Store, read, readable, status, until, write

pytestmark = [pytest.mark.bubblewrap, pytest.mark.s3]
LIKE_ANOTHER = pytest.mark.whole
LARGE = "head -c 6000000 /dev/urandom > large"
# A busy machine included, and less than without the shortened limit.
IN_TIME_S = 15.0

Fault = Literal["crawl", "stall", "cut"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
async def line(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FaultyLine]:
    monkeypatch.setattr(objects, "_PART_S", 0.5)
    async with FaultyLine(store).opened() as opened:
        yield opened


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < IN_TIME_S


@pytest.mark.parametrize("fault", ["crawl", "cut", pytest.param("stall", marks=LIKE_ANOTHER)])
async def test_a_download_that_fails_half_way_is_told_and_shows_nothing_of_it(
    tmp_path: Path, store: Store, line: FaultyLine, fault: Fault
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await (await one.session(CHAT)).exec(LARGE)
        await write(one, "kept")
    settings = store.config(tmp_path / "two", endpoint=line.endpoint)
    async with open_manager(settings) as two:
        line.fault = fault
        with in_time(), pytest.raises(BackendUnavailable, match="the object store"):
            await read(two)
        assert not [each for each in tmp_path.glob("two/sandbox/restoring/**/*") if each.is_file()]
        assert not list(tmp_path.glob("two/sandbox/workspace/*/*/*"))
        line.fault = ""
        await until(partial(readable, two))
        assert await read(two) == "kept"
        seen = await (await two.session(CHAT)).exec("stat -c %s large")
        assert seen.stdout == "6000000\n"


async def test_older_files_are_not_used_while_newer_ones_cannot_be_fetched(
    tmp_path: Path, store: Store, line: FaultyLine
) -> None:
    first = store.config(tmp_path / "one", endpoint=line.endpoint)
    async with open_manager(first) as one:
        await write(one, "older")
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "older"
        await (await two.session(CHAT)).exec(LARGE)
        await write(two, "newer")
    async with open_manager(first) as one:
        line.fault = "stall"
        with in_time(), pytest.raises(BackendUnavailable, match="the object store"):
            await read(one)
        line.fault = ""
        await until(partial(readable, one))
        assert await read(one) == "newer"


@pytest.mark.parametrize("fault", ["stall", "cut", pytest.param("crawl", marks=LIKE_ANOTHER)])
async def test_an_upload_that_fails_half_way_leaves_the_backup_before_it(
    tmp_path: Path, store: Store, line: FaultyLine, fault: Fault
) -> None:
    settings = store.config(tmp_path / "one", endpoint=line.endpoint, after=0.2)
    async with open_manager(settings) as one:
        await write(one, "1")
        before = await one.backups.save(CHAT)
        session = await one.session(CHAT)
        line.fault = fault
        await session.exec(LARGE)
        with in_time(), pytest.raises(StorageUnavailable):
            await one.backups.save(CHAT)
        with in_time(), pytest.raises(StorageUnavailable):
            await session.share("large")
        assert list(await one.backups.list(CHAT)) == [before]
        assert (await status(one)).unsaved
        assert (await session.exec("cat notes.txt")).stdout == "1"
        line.fault = ""

        async def is_saved() -> bool:
            return not (await status(one)).unsaved

        await until(is_saved)
        assert (await session.share("large")).startswith(line.endpoint)


async def test_keys_that_are_refused_after_they_worked_are_told_until_they_work_again(
    tmp_path: Path, store: Store
) -> None:
    async with open_manager(store.config(tmp_path / "one")) as one:
        await write(one, "1")
        await one.backups.save(CHAT)
        await write(one, "2")
        session = await one.session(CHAT)
        store.restart(access="another-key-of-tests")
        asked = (one.backups.save(CHAT), session.share("notes.txt"), one.backups.restore(CHAT))
        for work in asked:
            with in_time(), pytest.raises(StorageUnavailable, match=r"storage\.access_key"):
                await work
        assert await read(one) == "2"
        async with open_manager(store.config(tmp_path / "two")) as two:
            with in_time(), pytest.raises(StorageUnavailable, match=r"storage\.access_key"):
                await two.backups.restore(CHAT)
        store.restart()
        assert await one.backups.save(CHAT)


async def test_the_object_of_another_chat_is_passed_over_and_told(
    tmp_path: Path, store: Store
) -> None:
    other = ChatId("tester", "other")
    async with open_manager(store.config(tmp_path / "one")) as one:
        for text in ("1", "2"):
            await write(one, text)
            await one.backups.save(CHAT)
        await write(one, "another's", other)
        newest, theirs = (await one.backups.list(CHAT))[0], await one.backups.save(other)
        assert theirs
    archives = (next(store.folder.rglob(f"{each.key}.tar.zst")) for each in (newest, theirs))
    mine, foreign = archives
    mine.write_bytes(foreign.read_bytes())
    async with open_manager(store.config(tmp_path / "two")) as two:
        assert await read(two) == "1"
        told = " ".join(await (await two.session(CHAT)).take_notices())
        assert "could not be restored: what is stored is not what was saved" in told
