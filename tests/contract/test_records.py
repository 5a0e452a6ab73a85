"""What every record of chats promises, and what may befall the notes of the local one."""

import itertools
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.config import FleetConfig
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.chat_records import (
    BACKUP,
    ChatRecord,
    ChatRecords,
    SharedRecords,
    read_object,
)
from mcp_sandbox.storage.leases import Leases
from mcp_sandbox.storage.redis import FleetStore, Server
from tests.redis_server import RedisServer

NOON = 1_767_355_200.0
HOUR_S = 3600.0
ANN, BOB = ChatId("ann", "one"), ChatId("bob", "one")


def record(chat: ChatId, used_s: float = NOON) -> ChatRecord:
    return ChatRecord(
        chat=chat,
        backend="docker",
        created_s=NOON - 24 * HOUR_S,
        used_s=used_s,
        sandbox_id=SandboxId("mcs-1"),
        image="base",
        spec="d1",
        further={"grants": {"network": ["example.org"]}},
    )


@pytest.fixture(params=["local", pytest.param("shared", marks=pytest.mark.redis)])
async def records(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncGenerator[ChatRecords]:
    if request.param == "local":
        yield ChatRecords(tmp_path)
        return
    server = await to_thread.run_sync(RedisServer)
    try:
        async with sharing(server, tmp_path, "a") as (found, _):
            yield found
    finally:
        await to_thread.run_sync(server.close)


@asynccontextmanager
async def sharing(
    server: RedisServer, data_root: Path, name: str
) -> AsyncGenerator[tuple[SharedRecords, FleetStore]]:
    """The records of one of several servers."""
    store = FleetStore(server.url, Server(name, f"http://{name}", name, name), 30)
    leases = Leases(store, time.monotonic, FleetConfig(), wait_s=0)
    try:
        yield SharedRecords(data_root, store, leases), store
    finally:
        await store.aclose()


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "sandbox" / "records" / "ann" / "chat-one.json"


def set_aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


async def test_a_record_comes_back_as_it_was_put(records: ChatRecords) -> None:
    bare = ChatRecord(BOB, None, NOON, NOON)
    await records.put(record(ANN))
    await records.put(bare)
    assert await records.get(ANN) == record(ANN)
    assert await records.get(BOB) == bare
    assert await records.get(ChatId("ann", "two")) is None
    assert {one.chat: one for one in await records.list()} == {ANN: record(ANN), BOB: bare}


async def test_a_second_record_of_a_chat_replaces_the_first(records: ChatRecords) -> None:
    await records.put(record(ANN))
    later = replace(record(ANN), backend="bubblewrap", spec="d2", further={})
    await records.put(later)
    assert await records.list() == [later]


async def test_the_last_used_comes_first(records: ChatRecords) -> None:
    old, new = record(ANN), record(BOB, NOON + HOUR_S)
    other = record(ChatId("ann", "two"), NOON + 2 * HOUR_S)
    for item in (old, new, other):
        await records.put(item)
    assert await records.list() == [other, new, old]


async def test_a_touch_moves_forward_only_and_makes_no_record(records: ChatRecords) -> None:
    await records.put(record(ANN))
    await records.touch({ANN: NOON + HOUR_S, BOB: NOON + HOUR_S})
    await records.touch({ANN: NOON})
    assert await records.list() == [record(ANN, NOON + HOUR_S)]


async def test_a_removed_chat_is_unknown_and_may_be_removed_again(records: ChatRecords) -> None:
    await records.put(record(ANN))
    await records.remove(ANN)
    await records.remove(ANN)
    assert await records.list() == []
    assert await records.get(ANN) is None


async def test_records_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    await ChatRecords(tmp_path).put(record(ANN))
    assert await ChatRecords(tmp_path).list() == [record(ANN)]


async def test_two_servers_see_each_others_records(tmp_path: Path) -> None:
    first, second = ChatRecords(tmp_path), ChatRecords(tmp_path)
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            one = first if number % 2 else second
            tasks.start_soon(one.put, record(ChatId("u", f"c{number}")))
    assert len(await first.list()) == len(await second.list()) == 20


async def test_what_a_newer_server_wrote_stays(tmp_path: Path, note: Path) -> None:
    records = ChatRecords(tmp_path)
    await records.put(record(ANN))
    newer = {**json.loads(note.read_bytes()), "machine": {"name": "m1"}}
    note.write_text(json.dumps(newer))
    found = await records.get(ANN)
    assert found is not None
    assert found.further == {"grants": {"network": ["example.org"]}, "machine": {"name": "m1"}}
    await records.put(replace(found, sandbox_id=SandboxId("mcs-2")))
    assert json.loads(note.read_bytes()) == {**newer, "sandbox_id": "mcs-2"}


async def test_an_unknown_backend_counts_as_none(tmp_path: Path, note: Path) -> None:
    records = ChatRecords(tmp_path)
    await records.put(record(ANN))
    note.write_text(json.dumps({**json.loads(note.read_bytes()), "backend": "punchcards"}))
    found = await records.get(ANN)
    assert found is not None
    assert (found.backend, found.sandbox_id) == (None, "mcs-1")
    assert set_aside(note) == []


@pytest.mark.redis
async def test_servers_see_what_each_other_wrote_but_not_whose_files_are_saved(
    tmp_path: Path,
) -> None:
    server = await to_thread.run_sync(RedisServer)
    try:
        async with (
            sharing(server, tmp_path / "a", "a") as (a, store),
            sharing(server, tmp_path / "b", "b") as (b, _),
        ):
            saved = {**record(ANN).further, BACKUP: {"epoch": 7, "clean": True}}
            await a.put(replace(record(ANN), further=saved))
            found = await b.get(ANN)
            assert found is not None
            assert found.further == {**record(ANN).further, BACKUP: {"newest": 7}}
            assert await b.here.list() == []
            await b.put(found)
            assert read_object(await a.look(ANN), BACKUP)["newest"] == 7
            await b.here.remove(ANN)
            await b.keep(ANN, BACKUP, lambda _: {"epoch": 5}, NOON)
            (found,) = await b.list()
            assert found.further[BACKUP] == {"epoch": 5, "newest": 7}
            # What nobody can read is passed over: the copy counts.
            await store.write(ANN, {"sandbox_id": 5}, NOON)
            assert (await a.look(ANN), await b.get(ChatId("ann", "two"))) == (
                replace(record(ANN), further=saved),
                None,
            )
    finally:
        await to_thread.run_sync(server.close)


async def test_one_server_at_a_time_holds_a_chat(tmp_path: Path) -> None:
    first, second = ChatRecords(tmp_path), ChatRecords(tmp_path)
    order: list[str] = []

    async def wait() -> None:
        async with second.hold(ANN) as ours:
            order.append(f"second {ours}")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            async with first.hold(ANN), second.hold(BOB):
                async with second.hold(ANN, at_once=True) as ours:
                    assert not ours
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                order.append("first")
    assert order == ["first", "second True"]


async def test_a_lock_is_gone_with_its_process(tmp_path: Path) -> None:
    program = """
import sys, anyio
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import ChatRecords
async def main():
    async with ChatRecords(Path(sys.argv[1])).hold(ChatId("ann", "one")):
        print("held", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    records = ChatRecords(tmp_path)
    with anyio.fail_after(30):
        async with await anyio.open_process([sys.executable, "-c", program, tmp_path]) as other:
            assert other.stdout is not None
            # Unbuffered, its line comes in two pieces.
            assert (await other.stdout.receive()).startswith(b"held")
            async with records.hold(ANN, at_once=True) as ours:
                assert not ours
            other.kill()
        async with records.hold(ANN) as ours:
            assert ours


async def test_only_the_owner_may_read_what_is_written(tmp_path: Path) -> None:
    records = ChatRecords(tmp_path)
    await records.put(record(ANN))
    async with records.hold(ANN):
        pass
    made = [*(tmp_path / "sandbox" / "records").rglob("*"), *(tmp_path / "sandbox").rglob("locks")]
    assert len(made) == 3
    assert {os.stat(path).st_mode & 0o077 for path in made} == {0}


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def ruin(path: Path) -> None:
        path.unlink()
        make(path)

    return ruin


RUINS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(20_000)),
    "no UTF-8": lambda path: path.write_bytes(b'{"backend": "\xff\xfe"}'),
    "cut off": lambda path: os.truncate(path, 25),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "a number": lambda path: path.write_bytes(b"7"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "other kinds": lambda path: path.write_bytes(b'{"sandbox_id": 5}'),
    "a birth in no year": lambda path: path.write_bytes(b'{"created": 1e99}'),
    "a folder": instead(Path.mkdir),
    "a link": instead(lambda path: path.symlink_to("/etc/passwd")),
    "a pipe": instead(os.mkfifo),
}


@pytest.mark.parametrize("ruin", RUINS.values(), ids=RUINS.keys())
async def test_a_note_that_is_damaged_is_set_aside_and_the_chat_stays_known(
    tmp_path: Path,
    note: Path,
    ruin: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = ChatRecords(tmp_path)
    await records.put(record(ANN))
    await records.put(record(BOB))
    ruin(note)
    assert {(one.chat, one.backend) for one in await records.list()} == {
        (ANN, None),
        (BOB, "docker"),
    }
    await records.touch({ANN: NOON + HOUR_S})
    for _ in range(2):
        async with records.hold(ANN):
            found = await records.get(ANN)
        assert found is not None
        assert (found.backend, found.sandbox_id) == (None, None)
    assert len(set_aside(note)) == 1
    assert caplog.text.count("is damaged") == 1
    await records.put(record(ANN))
    assert await records.get(ANN) == record(ANN)


@pytest.mark.parametrize("ruin", [RUINS["garbage"], RUINS["a folder"], RUINS["a link"], os.unlink])
async def test_a_lock_file_that_is_damaged_locks_again(
    tmp_path: Path, ruin: Callable[[Path], object]
) -> None:
    records = ChatRecords(tmp_path)
    for _ in range(2):
        async with records.hold(ANN):
            async with records.hold(ANN, at_once=True) as ours:
                assert not ours
        ruin(tmp_path / "sandbox" / "locks" / "ann" / "chat-one")


async def test_at_most_three_ruins_are_kept(tmp_path: Path, note: Path) -> None:
    records = ChatRecords(tmp_path)
    for _ in range(6):
        await records.put(record(ANN))
        note.write_bytes(b"garbage")
        await records.get(ANN)
    assert len(set_aside(note)) == 3


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
    records = ChatRecords(small_disk)
    kept: list[ChatId] = []

    async def fill() -> None:
        for number in itertools.count():
            chat = ChatId("u", f"{'x' * 100}{number}")
            await records.put(record(chat))
            kept.append(chat)

    with pytest.raises(StorageUnavailable, match="files are not concerned"):
        await fill()
    assert len(kept) > 10
    assert {item.chat for item in await records.list()} >= set(kept)
    # A note that is there already is written beside itself, or stays as it was.
    with pytest.raises(StorageUnavailable):
        await records.put(replace(record(kept[0]), spec="d2"))
    assert await records.get(kept[0]) == record(kept[0])
    await anyio.run_process(["mount", "-o", "remount,size=2m", str(small_disk)])
    await records.put(record(ANN))
    assert {item.chat for item in await records.list()} >= {ANN, *kept}
    assert list((small_disk / "sandbox").rglob("*.damaged-*")) == []


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


@pytest.mark.parametrize("left", range(3))
async def test_a_lack_of_descriptors_loses_nothing_and_passes(tmp_path: Path, left: int) -> None:
    records = ChatRecords(tmp_path)
    await records.put(record(ANN))
    with descriptors_left(left):
        for work in (records.put(record(BOB)), records.get(ANN), records.list()):
            with suppress(StorageUnavailable):
                await work
    assert await records.get(ANN) == record(ANN)
    assert list(tmp_path.rglob("*.damaged-*")) == []


WRITER = """
import pickle, sys, anyio
from dataclasses import replace
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import ChatRecords
async def main():
    records = ChatRecords(Path(sys.argv[1]))
    number, record = int(sys.argv[2]), pickle.loads(bytes.fromhex(sys.argv[3]))
    while True:
        await records.put(replace(record, chat=ChatId("u", f"c{number}")))
        await records.put(replace(record, chat=ChatId("u", "again"), used_s=number))
        print(number, flush=True)
        number += 1
anyio.run(main)
"""


def killed_writer(data_root: Path, first: int, after: int) -> int:
    """The last number that a writer, killed after `after` more of them, said it had written."""
    given = [str(data_root), str(first), pickle.dumps(record(ANN)).hex()]
    command = [sys.executable, "-c", WRITER, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout is not None
        for _ in range(after):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split()
    return int(said[-1]) if said else first + after - 1


@pytest.mark.slow
async def test_a_writer_killed_at_any_point_loses_nothing_it_wrote(tmp_path: Path) -> None:
    first = 1
    records = ChatRecords(tmp_path)
    for after in range(1, 20, 2):
        last = await anyio.to_thread.run_sync(killed_writer, tmp_path, first, after)
        known = {item.chat.chat: item for item in await records.list()}
        again = known.pop("again")
        written = {int(name[1:]) for name in known}
        # The one that was under way may be there, or not.
        assert written - {last + 1} == set(range(1, last + 1))
        assert again.backend == "docker"
        first = max(written) + 1
    assert list(tmp_path.rglob("*.damaged-*")) == []


async def test_processes_that_begin_at_once_agree(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                start = number * 1000
                tasks.start_soon(anyio.to_thread.run_sync, killed_writer, tmp_path, start, 5)
    numbers = {item.chat.chat for item in await ChatRecords(tmp_path).list()}
    assert numbers >= {f"c{start * 1000 + step}" for start in range(4) for step in range(5)}
    assert list(tmp_path.rglob("*.damaged-*")) == []
