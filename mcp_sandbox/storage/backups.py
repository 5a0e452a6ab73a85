"""Backups of chats: a compressed stream each, and a manifest, which is what makes it one.

    {prefix}/{user}/{chat}/{epoch}-{time}-{random}.tar.zst    what was packed inside the sandbox
                          /{epoch}-{time}-{random}.json       written last: its manifest
            /shared/{user}/{chat}/{sha256}/NAME               a file that a link downloads

Names are in the order of lists: by the epoch of the server that saved them, then by time; which of
them counts is decided in `descent`. An object without a manifest is what an upload that was cut off
has left.
"""

import hashlib
import logging
import math
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Literal
from urllib.parse import quote

from anyio import to_thread
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from mcp_sandbox import __version__
from mcp_sandbox.config.sections import StorageConfig
from mcp_sandbox.config.values import show_size
from mcp_sandbox.errors import BackupDamaged, Busy, StorageUnavailable, TooLarge
from mcp_sandbox.models import ChatId, Packed
from mcp_sandbox.storage.objects import ObjectStore, Take

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

ListOld = Callable[[list[str], set[str]], Sequence[str]]

_ARCHIVE, _MANIFEST = ".tar.zst", ".json"
KEY_TIME, _TICK, _DASHES = "%Y%m%dT%H%M%S.%f", timedelta(microseconds=1), 2
_MANIFEST_BYTES = 16 << 10
# How long an opening waits for the list of backups.
_ANSWER_S = 5.0
# Level 3 looks back 2 MiB; a stream that wants more memory than 8 MiB is none that we made.
_LEVEL, _WINDOW_LOG = 3, 23
_PIECE = 1 << 20
# Less is compressed faster than a thread is found.
_SMALL = 64 << 10
MOST_ANCESTORS = 64
# Longer than any upload takes: what is older and has no manifest never gets one.
_ABANDONED = timedelta(hours=6)
# Longer than any link is good.
_SHARED = timedelta(days=2)
# What others have written into a manifest, and what floats and time zones can take.
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class NewSave:
    """What is known of a backup before its upload; its key is greater than those of ancestors."""

    epoch: int
    saved_at: datetime
    ancestors: tuple[str, ...] = ()
    server: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        time = self.saved_at.strftime(KEY_TIME)
        for before in (key.split("-")[1] for key in self.ancestors if key.count("-") == _DASHES):
            with suppress(ValueError, OverflowError):
                after = datetime.strptime(before, KEY_TIME).replace(tzinfo=UTC) + _TICK
                time = max(time, after.strftime(KEY_TIME))
        object.__setattr__(self, "key", f"{self.epoch:013d}-{time}-{secrets.token_hex(4)}")


class Backup(BaseModel):
    """One backup, as its manifest says. `size` is what is stored, `files_bytes` what it unpacks to.

    `key` names it among those of its chat. `quiet`: nothing ran while it was made. `server` made
    it, from what the `ancestors` had, the latest first; None: by a version that notes neither.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: Literal[1] = 1
    chat: ChatId
    key: str
    epoch: Number
    saved_at: Annotated[AwareDatetime, Field(ge=_FIRST, lt=_LAST)]
    size: Number
    files_bytes: Number
    entries: Number
    quiet: bool
    sha256: str
    version: str
    ancestors: tuple[Annotated[str, Field(max_length=100)], ...] | None = Field(
        None, max_length=MOST_ANCESTORS
    )
    server: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""

    @property
    def line(self) -> set[str]:
        """Return its key and those of its ancestors, as far as it names them."""
        return {self.key, *(self.ancestors or ())}


class Backups:
    """The backups of all chats in one bucket.

    Every method may raise StorageUnavailable: the object store cannot be used now.
    """

    def __init__(self, settings: StorageConfig) -> None:
        self._settings = settings
        self._objects = ObjectStore(settings)
        self.breaker = self._objects.breaker

    async def save(
        self,
        chat: ChatId,
        new: NewSave,
        pack: Callable[[Take], Awaitable[Packed]],
        *,
        quiet: Callable[[], bool],
    ) -> Backup:
        """Store what `pack` hands over as a new backup.

        `quiet` tells afterwards whether nothing ran meanwhile.

        Raises TooLarge: it is over `storage.max_size`; else what `pack` raises.
        """
        name = f"{_folder(chat)}/{new.key}"
        async with self._objects.writing(f"{name}{_ARCHIVE}") as write:
            stored = _Stream(write, self._settings.max_size, zstd.ZstdCompressor(level=_LEVEL))
            packed = await pack(stored.take)
            await stored.end()
        backup = Backup(
            **asdict(new),
            chat=chat,
            size=stored.size,
            files_bytes=packed.bytes,
            entries=packed.entries,
            quiet=quiet(),
            sha256=stored.digest.hexdigest(),
            version=__version__,
        )
        await self._objects.put_small(f"{name}{_MANIFEST}", backup.model_dump_json().encode())
        return backup

    async def list(self, chat: ChatId, *, soon: bool = False) -> Sequence[Backup]:
        """Return the chat's backups, the newest first, without those whose manifest is damaged.

        `soon`, as while a call waits: not if the store has just failed, nor for more than seconds.
        """
        if soon and self.breaker.is_open:
            raise StorageUnavailable(self.breaker.why)
        with self._objects.within(_ANSWER_S if soon else math.inf):
            return await self._list(chat)

    async def _list(self, chat: ChatId) -> Sequence[Backup]:
        found: list[Backup] = []
        for key in sorted(_keys(await self._own(chat), _MANIFEST), reverse=True):
            name = f"{_folder(chat)}/{key}{_MANIFEST}"
            text = await self._objects.get_small(name, _MANIFEST_BYTES)
            try:
                backup = Backup.model_validate_json(text)
            except ValueError as exc:
                logger.warning("backup %s of chat %s has no usable manifest: %s", key, chat, exc)
                continue
            if (backup.chat, backup.key) == (chat, key):
                found.append(backup)
            else:
                logger.warning("backup %s of chat %s has the manifest of another", key, chat)
        return found

    async def read(self, backup: Backup) -> AsyncGenerator[bytes]:
        """Yield the stream that was packed.

        Raises BackupDamaged: it is not what was saved. What came before is not to be kept then.
        """
        unpacker = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        )
        digest, size, unpacked = hashlib.sha256(), 0, 0
        stored = self._objects.get(f"{_folder(backup.chat)}/{backup.key}{_ARCHIVE}")
        async with aclosing(stored) as pieces:
            async for piece in pieces:
                size += len(piece)
                await to_thread.run_sync(digest.update, piece)
                data = piece
                while not unpacker.eof and (data or not unpacker.needs_input):
                    try:
                        out = await to_thread.run_sync(unpacker.decompress, data, _PIECE)
                    except zstd.ZstdError as exc:
                        raise BackupDamaged(f"it cannot be decompressed: {exc}") from exc
                    data, unpacked = b"", unpacked + len(out)
                    if unpacked > self._settings.max_size:
                        raise BackupDamaged("it unpacks to more than storage.max_size")
                    if out:
                        yield out
        is_whole = unpacker.eof and not unpacker.unused_data and size == backup.size
        if not (is_whole and digest.hexdigest() == backup.sha256):
            raise BackupDamaged("what is stored is not what was saved")

    async def prune(self, chat: ChatId, list_old: ListOld, unused_s: float) -> None:
        """Remove backups that are old, what broken uploads left, and what was shared.

        `list_old` gets the listed keys, and those stored `unused_s` or longer before the last.
        """
        objects, folder = await self._own(chat), _folder(chat)
        known, now = _keys(objects, _MANIFEST), datetime.now(UTC)
        # All by the clock of the store: that of a server may be wrong.
        last = max(objects.values(), default=now)
        stored = {key: last - objects[f"{folder}/{key}{_MANIFEST}"] for key in known}
        unused = {key for key, age in stored.items() if 0 < unused_s <= age.total_seconds()}
        left = [
            name
            for key in _keys(objects, _ARCHIVE)
            if key not in known and objects[name := f"{folder}/{key}{_ARCHIVE}"] < now - _ABANDONED
        ]
        shared = await self._objects.list(f"shared/{folder}")
        left += [name for name, at in shared.items() if at < now - _SHARED]
        # The manifest first: what is left of a removal that is cut off is no backup any more.
        old = list_old(known, unused)
        gone = [f"{folder}/{key}{end}" for key in old for end in (_MANIFEST, _ARCHIVE)]
        await self._objects.delete([*gone, *left])

    async def remove(self, chat: ChatId) -> None:
        """Remove all backups and shared files of a chat."""
        shared = await self._objects.list(f"shared/{_folder(chat)}")
        # In the order of names a manifest goes before its archive.
        await self._objects.delete(sorted([*await self._own(chat), *shared]))

    async def _own(self, chat: ChatId) -> Mapping[str, datetime]:
        """Return what lies in the chat's folder; below one of a user "shared" are others' files."""
        found = await self._objects.list(_folder(chat))
        return {name: at for name, at in found.items() if name.rpartition("/")[0] == _folder(chat)}

    async def share(
        self, chat: ChatId, name: str, read: Callable[[Take], Awaitable[object]], expires_s: float
    ) -> str:
        """Store what `read` hands over; return a URL by which anybody downloads it, for so long.

        Raises Busy: the file changed meanwhile; TooLarge; else what `read` raises.
        """
        name = "".join(each if each.isprintable() else "_" for each in name)
        name = name if name.strip(".") else "file"
        # It is read twice, as its digest is in its name: a file may be larger than our disk.
        measured = _Stream(_drop, self._settings.max_size)
        await read(measured.take)
        digest = measured.digest.hexdigest()
        key = f"shared/{_folder(chat)}/{digest}/{name}"
        async with self._objects.writing(key, shown_as=quote(name, safe="")) as write:
            stored = _Stream(write, self._settings.max_size)
            await read(stored.take)
            if stored.digest.hexdigest() != digest:
                raise Busy(f"{name} changed while it was read: share it again when it is written")
        return await self._objects.sign(key, expires_s)

    async def check(self) -> None:
        """Write, read, list and remove a small object; raises StorageUnavailable with the cause."""
        name = f"check/{secrets.token_hex(8)}"
        await self._objects.put_small(name, b"ok")
        try:
            found = await self._objects.get_small(name, 2), [*await self._objects.list("check")]
        finally:
            await self._objects.delete([name])
        if found[0] != b"ok" or name not in found[1]:
            raise StorageUnavailable(
                "the object store does not return what was stored: is storage.endpoint S3?"
            )


class _Stream:
    """Compresses what it takes, and counts: `size` and `digest` are of what it puts."""

    def __init__(self, put: Take, max_size: int, packer: zstd.ZstdCompressor | None = None) -> None:
        """Without a `packer` nothing is compressed."""
        self.size, self.digest = 0, hashlib.sha256()
        self._put, self._taken, self._max_size = put, 0, max_size
        self._compress = packer.compress if packer else bytes
        self._flush = packer.flush if packer else bytes

    async def take(self, data: bytes) -> None:
        """Take more; raises TooLarge."""
        self._taken += len(data)
        if self._taken > self._max_size:
            raise TooLarge(
                f"this is more than storage.max_size ({show_size(self._max_size)}), so it is not "
                "stored: make it smaller, or have the operator allow more"
            )
        pack = partial(self._pack, self._compress, data)
        await self._put(pack() if len(data) < _SMALL else await to_thread.run_sync(pack))

    async def end(self) -> None:
        await self._put(self._pack(self._flush))

    def _pack(self, compress: Callable[..., bytes], *data: bytes) -> bytes:
        packed = compress(*data)
        self.size += len(packed)
        self.digest.update(packed)
        return packed


def _folder(chat: ChatId) -> str:
    return f"{chat.user}/{chat.chat}"


def _keys(names: Iterable[str], end: str) -> list[str]:
    return [name.rpartition("/")[2].removesuffix(end) for name in names if name.endswith(end)]


async def _drop(_: bytes) -> None:
    """Store nothing."""
