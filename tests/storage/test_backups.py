"""Backups of chats, in a real S3 server."""

import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.abc import ByteStream, SocketAttribute

from mcp_sandbox.app.chats import check
from mcp_sandbox.config import Config
from mcp_sandbox.doctor.machine import Check, examine_place, examine_storage
from mcp_sandbox.errors import (
    BackupDamaged,
    Busy,
    ConfigError,
    SandboxGone,
    StorageUnavailable,
    TooLarge,
)
from mcp_sandbox.models import ChatId, Packed
from mcp_sandbox.storage import descent
from mcp_sandbox.storage.backups import Backup, Backups, NewSave
from mcp_sandbox.storage.objects import Take
from tests.daemon.running import ended
from tests.rclone import BUCKET, SECRET, S3Server

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = [pytest.mark.anyio, pytest.mark.s3]

MIB = 1 << 20
NOISE = os.urandom(MIB)
# More than one part of an upload, which cannot be made smaller.
NOISES = [os.urandom(MIB) for _ in range(16)]


class Pack:
    """Hands over pieces as the runner does."""

    def __init__(self, *pieces: bytes, then: Exception | None = None) -> None:
        self.pieces: Iterable[bytes] = pieces
        self._then = then

    async def __call__(self, take: Take) -> Packed:
        size = 0
        for piece in self.pieces:
            await take(piece)
            size += len(piece)
        if self._then:
            raise self._then
        return Packed(1, size)


@pytest.fixture
def chat(request: pytest.FixtureRequest) -> ChatId:
    return ChatId("ada", f"chat-{abs(hash(request.node.nodeid))}")


@pytest.fixture
def backups(s3: S3Server) -> Backups:
    return Backups(s3.settings(keep=2))


async def save(backups: Backups, chat: ChatId, text: bytes = b"files", epoch: int = 1) -> Backup:
    return await backups.save(chat, new(epoch), Pack(text), quiet=lambda: True)


def new(epoch: int = 1) -> NewSave:
    return NewSave(epoch, datetime.now(UTC))


async def prune(backups: Backups, chat: ChatId, keep: int = 2) -> None:
    """Remove all but the newest, as a server does whose line they are."""
    await backups.prune(chat, lambda listed, _: sorted(listed)[:-keep], 0)


async def content(backups: Backups, backup: Backup) -> bytes:
    return b"".join([piece async for piece in backups.read(backup)])


def stored(s3: S3Server, chat: ChatId) -> list[Path]:
    return sorted((s3.folder / BUCKET / "mcp-sandbox" / chat.user / chat.chat).glob("*"))


async def test_what_was_saved_is_listed_and_read(backups: Backups, chat: ChatId) -> None:
    saved = await backups.save(chat, new(7), Pack(b"a" * MIB, NOISE, b""), quiet=lambda: False)
    assert (saved.epoch, saved.files_bytes, saved.quiet) == (7, 2 * MIB, False)
    assert list(await backups.list(chat)) == [saved]
    assert await content(backups, saved) == b"a" * MIB + NOISE


async def test_the_newest_comes_first_and_epochs_count_before_times(
    backups: Backups, chat: ChatId
) -> None:
    first, late, old = [await save(backups, chat, epoch=epoch) for epoch in (10, 10, 9)]
    assert list(await backups.list(chat)) == [late, first, old]


async def test_another_chat_has_other_backups(backups: Backups, chat: ChatId) -> None:
    await save(backups, chat)
    assert not await backups.list(ChatId(chat.user, f"{chat.chat}-2"))
    assert not await backups.list(ChatId("bob", chat.chat))


async def test_what_is_over_the_limit_is_not_saved(s3: S3Server, chat: ChatId) -> None:
    with pytest.raises(TooLarge, match="max_size"):
        await Backups(s3.settings(max_size=MIB)).save(
            chat, new(), Pack(NOISE, b"1"), quiet=lambda: True
        )
    assert not stored(s3, chat)


async def test_a_sandbox_that_dies_leaves_nothing(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    with pytest.raises(SandboxGone):
        await backups.save(chat, new(), Pack(*NOISES, then=SandboxGone("died")), quiet=lambda: True)
    assert not stored(s3, chat)


async def test_a_save_that_is_cancelled_leaves_nothing(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    packed = anyio.Event()

    async def pack(take: Take) -> Packed:
        await Pack(*NOISES)(take)
        packed.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(backups.save, chat, new(), pack, quiet=lambda: True))
        await packed.wait()
        # The server shows an unfinished upload as a hidden file.
        assert stored(s3, chat)
        tasks.cancel_scope.cancel()
    assert not stored(s3, chat)


KILLED = """
import os, sys
from functools import partial
import anyio
from mcp_sandbox.config.sections import StorageConfig
from mcp_sandbox.models import ChatId, Packed
from datetime import UTC, datetime
from mcp_sandbox.storage.backups import Backups, NewSave
from mcp_sandbox.storage.objects import ObjectStore

die = lambda *_: os.kill(os.getpid(), 9)

async def pack(take):
    for number in range(12):
        await take(os.urandom(1 << 20))
    if sys.argv[3] == "upload":
        die()
    return Packed(1, 12 << 20)

if sys.argv[3] == "manifest":
    ObjectStore.put_small = die
backups = Backups(StorageConfig.model_validate_json(sys.argv[1]))
chat, new = ChatId("ada", sys.argv[2]), NewSave(9, datetime.now(UTC))
anyio.run(partial(backups.save, chat, new, pack, quiet=lambda: True))
"""


@pytest.mark.parametrize("step", ["upload", "manifest"])
async def test_a_server_that_is_killed_in_a_save_leaves_the_backup_before(
    backups: Backups, s3: S3Server, chat: ChatId, step: str
) -> None:
    saved = await save(backups, chat)
    given = [s3.settings().model_dump_json(), chat.chat, step]
    killed = await anyio.run_process([sys.executable, "-c", KILLED, *given], check=False)
    assert (killed.returncode, killed.stderr) == (-9, b"")
    assert len(stored(s3, chat)) == 3
    assert list(await backups.list(chat)) == [saved]
    assert await content(backups, saved) == b"files"


@pytest.mark.alone
@pytest.mark.whole
async def test_a_large_chat_is_saved_and_read_in_little_memory(
    backups: Backups, chat: ChatId
) -> None:
    async def pack(take: Take) -> Packed:
        for _ in range(300):
            await take(os.urandom(MIB))
        return Packed(1, 300 * MIB)

    async def watch() -> None:
        while True:
            most[0] = max(most[0], resident())
            await anyio.sleep(0.02)

    await content(backups, await save(backups, chat))
    idle = resident()
    most, size = [idle], 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        saved = await backups.save(chat, new(2), pack, quiet=lambda: True)
        async for piece in backups.read(saved):
            size += len(piece)
        tasks.cancel_scope.cancel()
    assert size == 300 * MIB
    assert most[0] - idle <= 64 * MIB


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "other", "gone"])
async def test_what_is_not_what_was_saved_is_noticed_before_its_end(
    backups: Backups, s3: S3Server, chat: ChatId, damage: str
) -> None:
    await save(backups, chat, NOISE + b"other")
    saved = await save(backups, chat, NOISE)
    other, archive = [path for path in stored(s3, chat) if path.suffix == ".zst"]
    data = bytearray(archive.read_bytes())
    if damage == "cut":
        archive.write_bytes(data[:-9])
    elif damage == "longer":
        archive.write_bytes(data + b"1")
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        archive.write_bytes(data)
    elif damage == "other":
        archive.write_bytes(other.read_bytes())
    else:
        archive.unlink()
    s3.restart()
    with pytest.raises(BackupDamaged):
        await content(Backups(s3.settings()), saved)


async def test_a_bomb_is_stopped_at_the_limit(s3: S3Server, chat: ChatId) -> None:
    saved = await Backups(s3.settings()).save(
        chat, new(), Pack(*[bytes(MIB)] * 40), quiet=lambda: True
    )
    assert saved.size < MIB
    with pytest.raises(BackupDamaged, match="max_size"):
        await content(Backups(s3.settings(max_size=8 * MIB)), saved)


async def test_a_stream_that_wants_much_memory_is_refused(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    saved = await save(backups, chat)
    large = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    _, archive = stored(s3, chat)
    archive.write_bytes(large.compress(NOISE) + large.flush())
    s3.restart()
    with pytest.raises(BackupDamaged, match="cannot be decompressed"):
        await content(Backups(s3.settings()), saved)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 2}', b"x" * 20_000])
async def test_a_damaged_manifest_is_passed_over(
    backups: Backups, s3: S3Server, chat: ChatId, text: bytes
) -> None:
    whole = await save(backups, chat)
    await save(backups, chat)
    stored(s3, chat)[2].write_bytes(text)
    s3.restart()
    assert list(await backups.list(chat)) == [whole]


NUMBERS = ["9" * 400, "-1", "1e400", str(1 << 53), '"1"']


@pytest.mark.parametrize(
    "value", [*NUMBERS, '"2026-01-01T00:00:00"', '"0001-01-01T00:00:00+23:00"']
)
@pytest.mark.parametrize("field", ["epoch", "saved_at", "size", "files_bytes", "entries"])
async def test_a_manifest_with_what_no_server_writes_is_passed_over(
    backups: Backups, s3: S3Server, chat: ChatId, field: str, value: str
) -> None:
    whole = await save(backups, chat)
    await save(backups, chat)
    file = stored(s3, chat)[2]
    text = re.sub(rf'"{field}": ?("[^"]*"|\d+)', f'"{field}": {value}', file.read_text())
    file.write_text(text)
    s3.restart()
    assert list(await backups.list(chat)) == [whole]


async def test_a_manifest_of_another_backup_is_passed_over(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    whole = await save(backups, chat)
    await save(backups, chat)
    first, *_, last = [path for path in stored(s3, chat) if path.suffix == ".json"]
    last.write_bytes(first.read_bytes())
    s3.restart()
    assert list(await backups.list(chat)) == [whole]


async def test_an_archive_without_its_manifest_is_no_backup_and_goes_when_old(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    for _ in range(4):
        await save(backups, chat)
    late, early = stored(s3, chat)[1], stored(s3, chat)[3]
    late.with_name(late.name.replace(".tar.zst", ".json")).unlink()
    early.with_name(early.name.replace(".tar.zst", ".json")).unlink()
    os.utime(early, (0, 0))
    s3.restart()
    assert len(await Backups(s3.settings()).list(chat)) == 2
    fresh = Backups(s3.settings(keep=1))
    await prune(fresh, chat, keep=1)
    assert len(await fresh.list(chat)) == 1
    assert len(stored(s3, chat)) == 3
    assert late in stored(s3, chat)


async def test_a_line_that_nobody_continues_goes_by_the_clock_of_the_store(
    s3: S3Server, chat: ChatId
) -> None:
    backups = Backups(s3.settings())
    others = [await save(backups, chat) for _ in range(2)]
    for path in stored(s3, chat):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    mine = await save(backups, chat)
    s3.restart()
    backups = Backups(s3.settings())
    found = await backups.list(chat)
    thin = partial(descent.list_old, {mine.key}, found, keep=5)
    for unused_s in (0, 3 * 86_400):
        await backups.prune(chat, thin, unused_s)
        assert len(await backups.list(chat)) == 1 + len(others)
    await backups.prune(chat, thin, 86_400)
    assert list(await backups.list(chat)) == [mine]
    assert len(stored(s3, chat)) == 2


async def test_a_shared_file_goes_when_no_link_to_it_is_good_any_more(
    s3: S3Server, chat: ChatId
) -> None:
    backups = Backups(s3.settings())
    old, new = [
        await share(backups, chat, name, b"shared", expires_s=60) for name in ("old", "new")
    ]
    for path in (s3.folder / BUCKET / "mcp-sandbox/shared" / str(chat)).glob("*/old"):
        os.utime(path, (0, 0))
    s3.restart()
    await prune(Backups(s3.settings()), chat)
    assert [(await status(url))[0] for url in (old, new)] == [404, 200]


async def test_what_is_removed_takes_shared_files_along(
    backups: Backups, s3: S3Server, chat: ChatId
) -> None:
    await save(backups, chat)
    url = await share(backups, chat, "a.txt", b"shared", expires_s=60)
    await backups.remove(chat)
    assert not stored(s3, chat)
    assert (await status(url))[0] == 404


async def test_a_user_called_shared_has_nothing_of_others(backups: Backups, s3: S3Server) -> None:
    url = await share(backups, ChatId("bob", "1"), "a.json", b"shared", expires_s=60)
    mine = ChatId("shared", "bob")
    saved = await save(backups, mine)
    assert list(await backups.list(mine)) == [saved]
    await backups.remove(mine)
    assert not await backups.list(mine)
    assert (await status(url))[:2] == (200, b"shared")


@pytest.mark.parametrize("name", ["a.txt", "naïve ü.txt", "#?&%25.txt", "..", "a\nb", '"'])
async def test_a_shared_file_is_downloaded_by_its_link_alone(
    backups: Backups, chat: ChatId, name: str
) -> None:
    url = await share(backups, chat, name, b"hello ", b"world", expires_s=60)
    code, body, kind = await status(url)
    assert (code, body) == (200, b"hello world")
    assert kind.startswith("attachment; filename")
    assert (await status(f"{url[:-4]}0000"))[0] == 403
    assert (await status(url.partition("?")[0]))[0] in (400, 403)


async def test_what_changes_while_it_is_shared_is_not_shared(s3: S3Server, chat: ChatId) -> None:
    texts = iter([b"first", b"second"])

    async def read(take: Take) -> None:
        await take(next(texts))

    with pytest.raises(Busy, match=r"a\.txt changed"):
        await Backups(s3.settings()).share(chat, "a.txt", read, 60)
    with pytest.raises(TooLarge, match="max_size"):
        await Backups(s3.settings(max_size=MIB)).share(chat, "a.txt", Pack(NOISE, b"1"), 60)
    with pytest.raises(SandboxGone):
        await Backups(s3.settings()).share(chat, "b", Pack(b"1", then=SandboxGone("died")), 60)


async def test_a_link_ends_in_time(backups: Backups, chat: ChatId) -> None:
    url = await share(backups, chat, "a.txt", b"text", expires_s=1)
    while (await status(url))[0] == 200:
        await anyio.sleep(0.1)
    assert (await status(url))[0] in (400, 403)


WRONG = {
    "bucket": ("nowhere", "no bucket storage.bucket"),
    "access_key": ("secret", "does not know storage.access_key"),
    "secret_key": ("access", "is not that of"),
    "endpoint": ("http://127.0.0.1:1", "does not answer"),
}


@pytest.mark.parametrize("field", WRONG)
async def test_each_wrong_setting_is_told_from_the_others(s3: S3Server, field: str) -> None:
    value, told = WRONG[field]
    given = f"file:{s3.folder.with_name(value)}" if field.endswith("key") else value
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match=told):
        await Backups(s3.settings(**{field: given})).check()
    assert time.monotonic() - began < 6
    await Backups(s3.settings()).check()


async def test_a_wrong_clock_is_told_from_a_wrong_key(s3: S3Server) -> None:
    text = "<Error><Code>RequestTimeTooSkewed</Code><Message>Too large.</Message></Error>"
    answer = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()

    async def refuse(client: ByteStream) -> None:
        async with client:
            await client.receive()
            await client.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, refuse)
            with pytest.raises(StorageUnavailable, match="this machine's clock"):
                await Backups(s3.settings(endpoint=f"http://127.0.0.1:{port}")).check()
            tasks.cancel_scope.cancel()


async def test_doctor_tries_the_store_and_says_what_is_wrong(s3: S3Server) -> None:
    async def found(**given: object) -> Check:
        (check,) = await examine_storage(Config(storage=s3.settings(**given)))
        return check

    assert (await found()).status == "ok"
    wrong = await found(bucket="nowhere")
    assert (wrong.status, wrong.found) == ("fail", "no chat is saved")
    assert "no bucket storage.bucket (nowhere): create it" in wrong.remedy
    assert await examine_storage(Config()) == []


@pytest.mark.bubblewrap
async def test_the_trial_of_a_doctor_is_not_saved(own_s3: S3Server) -> None:
    checks = await examine_place("bubblewrap", Config(storage=own_s3.settings()))
    assert {check.status for check in checks} == {"ok"}
    assert not list((own_s3.folder / BUCKET).iterdir())


def test_settings_that_say_half_are_refused(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"bucket": ""}, {"endpoint": ""}, {"endpoint": "localhost:9000"}):
        with pytest.raises(ValueError, match=r"endpoint|object store"):
            s3.settings(**given)
    monkeypatch.setenv("S3_ENDPOINT", "http://minio:9000/")
    assert s3.settings(endpoint="").endpoint == "http://minio:9000"


async def test_a_key_comes_from_a_variable_too(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", "not-the-key-at-all")
    with pytest.raises(StorageUnavailable):
        await Backups(s3.settings(secret_key="env:TEST_KEY")).check()
    with pytest.raises(StorageUnavailable, match="TEST_NONE is not set"):
        await Backups(s3.settings(secret_key="env:TEST_NONE")).check()
    with pytest.raises(ConfigError):
        Backups(s3.settings(secret_key="command: 'half"))


UNREADABLE = {
    "env:TEST_NONE": "the variable TEST_NONE is not set",
    "file:/nowhere/key": "its file cannot be used: No such file",
}


@pytest.mark.parametrize("where", UNREADABLE)
async def test_a_server_does_not_start_with_keys_that_cannot_be_read(
    s3: S3Server, tmp_path: Path, where: str
) -> None:
    given = {**s3.variables(), "MCP_SANDBOX_STORAGE__SECRET_KEY": where}
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **given}
    refused = await ended(["serve", "--data", str(tmp_path / "data")], env=env)
    assert refused.code == 1
    assert f"storage.secret_key cannot be read: {UNREADABLE[where]}" in refused.err


def test_a_server_starts_while_the_store_is_away(s3: S3Server) -> None:
    check(Config(storage=s3.settings(endpoint="http://127.0.0.1:1")))


async def test_keys_are_read_again_after_a_refusal(s3: S3Server, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    backups = Backups(s3.settings(secret_key=f"file:{key}"))
    for text in ("of yesterday's", "of tomorrow's"):
        key.write_text(text)
        with pytest.raises(StorageUnavailable, match="is not that of"):
            await backups.check()
    key.write_text(SECRET)
    await backups.check()


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "buckets")
    yield server
    server.close()


async def test_a_server_that_dies_in_an_upload_ends_it_at_once(
    own_s3: S3Server, chat: ChatId
) -> None:
    backups, threads = Backups(own_s3.settings()), threading.active_count()

    def pieces() -> Iterator[bytes]:
        for number in range(60):
            if number == 20:
                own_s3.strike()
            yield os.urandom(MIB)

    pack, began = Pack(), time.monotonic()
    pack.pieces = pieces()
    with pytest.raises(StorageUnavailable, match="does not answer"):
        await backups.save(chat, new(), pack, quiet=lambda: True)
    assert time.monotonic() - began < 6
    assert threading.active_count() <= threads + 3
    own_s3.start()
    assert not await backups.list(chat)
    await save(backups, chat)


async def test_a_server_that_hangs_is_given_up_in_time(own_s3: S3Server, chat: ChatId) -> None:
    backups = Backups(own_s3.settings())
    await save(backups, chat)
    own_s3.strike(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match="did not answer within 5 s"):
        await backups.list(chat)
    assert time.monotonic() - began < 8
    own_s3.strike(signal.SIGCONT)
    assert len(await backups.list(chat)) == 1


@pytest.mark.whole
@pytest.mark.parametrize(("ends", "within_s"), [(True, 8), (False, 45)])
async def test_a_server_that_hangs_in_an_upload_is_given_up(
    own_s3: S3Server, chat: ChatId, *, ends: bool, within_s: float
) -> None:
    backups = Backups(own_s3.settings())

    async def pack(take: Take) -> Packed:
        await Pack(*NOISES)(take)
        own_s3.strike(signal.SIGSTOP)
        if ends:
            raise SandboxGone("died")
        await Pack(*NOISES, *NOISES)(take)
        raise AssertionError

    began = time.monotonic()
    with pytest.raises(SandboxGone if ends else StorageUnavailable):
        await backups.save(chat, new(), pack, quiet=lambda: True)
    assert time.monotonic() - began < within_s
    own_s3.strike(signal.SIGCONT)
    assert not await backups.list(chat)


async def share(backups: Backups, chat: ChatId, name: str, *data: bytes, expires_s: float) -> str:
    return await backups.share(chat, name, Pack(*data), expires_s)


async def status(url: str) -> tuple[int, bytes, str]:
    """Return a download's status, body and disposition."""

    def fetch() -> tuple[int, bytes, str]:
        try:
            with urllib.request.urlopen(url, timeout=5) as found:
                return found.status, found.read(), found.headers.get("Content-Disposition", "")
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, b"", ""

    return await to_thread.run_sync(fetch)
