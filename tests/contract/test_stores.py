"""What every store of sessions promises, and what may befall the file of the default one."""

import itertools
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.store import SessionRecord, SessionStore
from mcp_sandbox.sessions.store_sqlite import SqliteStore
from tests.workspace.test_usage import as_nobody

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
ANN, BOB = ChatId("ann", "one"), ChatId("bob", "one")


def record(chat: ChatId, used: datetime = NOON) -> SessionRecord:
    return SessionRecord(
        id="4f2a",
        chat=chat,
        backend="docker",
        sandbox_id=SandboxId("mcs-1"),
        state="running",
        created_at=NOON - timedelta(days=1),
        last_used_at=used,
        image="base",
        spec="d1",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sandbox" / "sessions.sqlite"


@pytest.fixture(params=["sqlite"])
async def store(path: Path) -> AsyncGenerator[SessionStore]:
    async with aclosing(SqliteStore(path)) as opened:
        yield opened


async def test_a_record_comes_back_as_it_was_put(store: SessionStore) -> None:
    bare = replace(record(BOB), sandbox_id=None, image=None, state="warm")
    await store.put(record(ANN))
    await store.put(bare)
    assert set(await store.all()) == {record(ANN), bare}


async def test_a_second_record_of_a_chat_replaces_the_first(store: SessionStore) -> None:
    await store.put(record(ANN))
    later = replace(record(ANN), state="paused", spec="d2")
    await store.put(later)
    assert await store.all() == [later]


async def test_the_earlier_birth_and_the_later_use_count(store: SessionStore) -> None:
    first = record(ANN)
    await store.put(first)
    hour = timedelta(hours=1)
    await store.put(replace(first, created_at=first.created_at + hour, last_used_at=NOON - hour))
    assert await store.all() == [first]


async def test_the_last_used_comes_first(store: SessionStore) -> None:
    old, new = record(ANN), record(BOB, NOON + timedelta(hours=1))
    other = record(ChatId("ann", "two"), NOON + timedelta(hours=2))
    for item in (old, new, other):
        await store.put(item)
    assert await store.all() == [other, new, old]


async def test_a_touch_moves_forward_only_and_makes_no_record(store: SessionStore) -> None:
    await store.put(record(ANN))
    later = NOON + timedelta(minutes=5)
    await store.touch({ANN: later, BOB: later})
    await store.touch({ANN: NOON})
    assert await store.all() == [record(ANN, later)]


async def test_a_removed_chat_is_unknown_and_may_be_removed_again(store: SessionStore) -> None:
    await store.put(record(ANN))
    await store.remove(ANN)
    await store.remove(ANN)
    assert await store.all() == []


async def test_records_outlive_the_store_that_wrote_them(path: Path) -> None:
    async with aclosing(SqliteStore(path)) as first:
        await first.put(record(ANN))
    async with aclosing(SqliteStore(path)) as second:
        assert await second.all() == [record(ANN)]


async def test_two_stores_on_one_file_see_each_other(path: Path) -> None:
    async with aclosing(SqliteStore(path)) as first, aclosing(SqliteStore(path)) as second:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                one = first if number % 2 else second
                tasks.start_soon(one.put, record(ChatId("u", f"c{number}")))
        assert len(await first.all()) == len(await second.all()) == 20


async def test_only_the_owner_may_read_the_file(path: Path) -> None:
    async with aclosing(SqliteStore(path)) as store:
        await store.put(record(ANN))
        modes = [os.stat(file).st_mode & 0o077 for file in path.parent.iterdir()]
        assert len(modes) >= 3
        assert set(modes) == {0}


def set_aside(path: Path) -> list[Path]:
    found = sorted(path.parent.glob(f"{path.name}.corrupt-*"))
    return [item for item in found if not item.name.endswith(("-wal", "-shm"))]


def foreign_database(path: Path, script: str) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


@pytest.mark.parametrize(
    "ruin",
    [
        pytest.param(lambda path: path.write_bytes(os.urandom(20_000)), id="garbage"),
        pytest.param(lambda path: path.write_bytes(b"SQLite format 3\0" * 900), id="magic"),
        pytest.param(lambda path: os.truncate(path, 5_000), id="truncated"),
        pytest.param(lambda path: os.truncate(path, 50), id="cut in its header"),
        pytest.param(
            lambda path: foreign_database(path, "PRAGMA user_version = 99"), id="newer version"
        ),
        pytest.param(
            lambda path: foreign_database(path, "PRAGMA user_version = 1"), id="no tables"
        ),
        pytest.param(
            lambda path: foreign_database(
                path, "CREATE TABLE session (user, chat); PRAGMA user_version = 1"
            ),
            id="other columns",
        ),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), id="a directory"),
    ],
)
async def test_a_file_that_is_not_ours_is_set_aside_and_a_new_one_begun(
    path: Path, ruin: Callable[[Path], object]
) -> None:
    async with aclosing(SqliteStore(path)) as store:
        for number in range(200):
            await store.put(record(ChatId("u", f"c{number}")))
    ruin(path)
    async with aclosing(SqliteStore(path)) as store:
        assert await store.all() == []
        await store.put(record(ANN))
        assert await store.all() == [record(ANN)]
    assert len(set_aside(path)) == 1


@pytest.mark.parametrize(
    "change",
    ["user = '../x'", "state = 'flying'", "created_at = 9e99", "spec = CAST(x'ff' AS TEXT)"],
)
async def test_a_row_that_we_never_wrote_is_no_harm(path: Path, change: str) -> None:
    async with aclosing(SqliteStore(path)) as store:
        await store.put(record(ANN))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE session SET {change}")
        assert await store.all() == []
        await store.put(record(BOB))
        assert await store.all() == [record(BOB)]
    assert len(set_aside(path)) == 1


async def test_a_file_that_goes_bad_while_it_is_open_is_replaced(path: Path) -> None:
    async with aclosing(SqliteStore(path)) as first, aclosing(SqliteStore(path)) as second:
        await first.put(record(ANN))
        assert await second.all() == [record(ANN)]
        path.unlink()
        await second.put(record(BOB))
        assert await first.all() == [record(BOB)]
        garbage = path.with_name("garbage")
        garbage.write_bytes(b"garbage" * 5_000)
        garbage.rename(path)
        for one in (first, second):
            await one.put(record(ANN))
        assert await first.all() == await second.all()
        assert record(ANN) in await first.all()


async def test_at_most_three_ruins_are_kept(path: Path) -> None:
    for _ in range(6):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"garbage" * 1_000)
        async with aclosing(SqliteStore(path)) as store:
            assert await store.all() == []
    assert len(set_aside(path)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_read_only_file_is_set_aside(path: Path) -> None:
    async def write() -> None:
        async with aclosing(SqliteStore(path)) as store:
            await store.put(record(ANN))
            assert await store.all() == [record(ANN)]

    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")
    path.chmod(0o444)
    for file in (path.parent, path):
        os.chown(file, 65534, 65534)
    for parent in list(path.parents)[1:4]:
        parent.chmod(0o755)
    assert as_nobody(lambda: anyio.run(write)) == 0
    assert len(set_aside(path)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


async def test_a_full_disk_is_an_error_that_loses_nothing_and_passes(small_disk: Path) -> None:
    async with aclosing(SqliteStore(small_disk / "sessions.sqlite")) as store:
        kept: list[ChatId] = []

        async def fill() -> None:
            for number in itertools.count():
                chat = ChatId("u", f"{'x' * 100}{number}")
                await store.put(record(chat))
                kept.append(chat)

        with pytest.raises(StorageUnavailable, match="files are not concerned"):
            await fill()
        assert len(kept) > 10
        assert {item.chat for item in await store.all()} >= set(kept)
        await anyio.run_process(["mount", "-o", "remount,size=2m", str(small_disk)])
        await store.put(record(ANN))
        assert {item.chat for item in await store.all()} >= {ANN, *kept}
    assert set_aside(small_disk / "sessions.sqlite") == []


async def test_a_disk_that_is_full_from_the_start_is_an_error_that_passes(
    small_disk: Path,
) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(1_000_000))
    async with aclosing(SqliteStore(small_disk / "sessions.sqlite")) as store:
        with pytest.raises(StorageUnavailable):
            await store.put(record(ANN))
        (small_disk / "filler").unlink()
        await store.put(record(ANN))
        assert await store.all() == [record(ANN)]


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(number):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", range(6))
async def test_a_lack_of_descriptors_loses_nothing_and_passes(path: Path, left: int) -> None:
    async with aclosing(SqliteStore(path)) as store:
        await store.put(record(ANN))
    async with aclosing(SqliteStore(path)) as store:
        with descriptors_left(left), suppress(StorageUnavailable):
            await store.put(record(BOB))
        assert record(ANN) in await store.all()
    assert set_aside(path) == []


WRITER = """
import sys, anyio
from contextlib import aclosing
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.store_sqlite import SqliteStore
from tests.contract.test_stores import record
async def main():
    async with aclosing(SqliteStore(Path(sys.argv[1]))) as store:
        number = int(sys.argv[2])
        while True:
            await store.put(record(ChatId("u", f"c{number}")))
            print(number, flush=True)
            number += 1
anyio.run(main)
"""


def killed_writer(path: Path, first: int, after: int) -> int:
    """The last number that a writer, killed after `after` more of them, said it had written."""
    command = [sys.executable, "-c", WRITER, str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout is not None
        for _ in range(after):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split()
    return int(said[-1]) if said else first + after - 1


@pytest.mark.slow
async def test_a_writer_killed_at_any_point_loses_nothing_it_wrote(path: Path) -> None:
    first = 0
    for after in range(1, 26):
        last = await anyio.to_thread.run_sync(killed_writer, path, first, after)
        async with aclosing(SqliteStore(path)) as store:
            written = {int(item.chat.chat[1:]) for item in await store.all()}
        # The one that was under way may be there, or not.
        assert written - {last + 1} == set(range(last + 1))
        first = max(written) + 1
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert set_aside(path) == []


async def test_processes_that_open_a_new_file_at_once_agree(path: Path) -> None:
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(anyio.to_thread.run_sync, killed_writer, path, number * 1000, 5)
    async with aclosing(SqliteStore(path)) as store:
        numbers = {int(item.chat.chat[1:]) for item in await store.all()}
    assert numbers >= {start * 1000 + step for start in range(4) for step in range(5)}
    assert set_aside(path) == []
