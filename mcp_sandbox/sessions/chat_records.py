"""The stored record of each chat, and the lock by which one server at a time changes its sandbox.

A record says which backend and sandbox a chat has and when it was used last. Its files are listed
from the directories, what runs from the backend: a lost record costs the chat neither.

    {data root}/sandbox/records/{user}/chat-{chat}.json    the record; its mtime is the last use
                               /{user}/chat-{chat}.seen    the sandbox that its agent saw last
                       /locks/{user}/chat-{chat}           locked while a server has the chat

A record is written whole and synced when its content changes. The time of use is the file's mtime:
no call waits for it, and a power cut may lose it; so it may the sandbox seen last.
"""

import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import anyio
from anyio import to_thread

from mcp_sandbox import durable
from mcp_sandbox.errors import BackendUnavailable, InvalidArgument, StorageUnavailable
from mcp_sandbox.models import BackendName, ChatId, Limits, SandboxId
from mcp_sandbox.workspace.retention import Moment

if TYPE_CHECKING:
    # Loaded only by servers that share chats.
    from mcp_sandbox.storage.leases import Leases
    from mcp_sandbox.storage.redis import FleetStore

logger = logging.getLogger(__name__)

T = TypeVar("T")
Clock = Callable[[], Moment]

_PREFIX, _SUFFIX, _SEEN = "chat-", ".json", ".seen"
_BACKENDS = get_args(BackendName)
BACKUP = "backup"
CONTROL = "control"
_LATEST_S = 1e11
# A lock is tried again and again: a thread that waits in the kernel could not be cancelled.
_LOOK_AGAIN_S = (0.002, 0.1)
# Longer than it takes to make a sandbox, and to copy a project into it.
_LONG_S = 240.0


@dataclass(frozen=True)
class AssistantSpec:
    """What the assistant of a chat sets of its sandbox; an empty field means the usual."""

    name: str = ""
    image: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names_image: bool = False  # It is its own choice, not that of its program.


USUAL = AssistantSpec()


@dataclass(frozen=True)
class ChatRecord:
    """One chat. Times are seconds since the epoch; `spec` is the digest of the sandbox's settings.

    `backend` is None if it is unknown. `further` has the values that other modules, or a newer
    version, store with a chat by name, such as "egress", its grants, until it is emptied.
    """

    chat: ChatId
    backend: BackendName | None
    created_s: float
    used_s: float
    sandbox_id: SandboxId | None = None
    image: str | None = None
    spec: str = ""
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_assistant_spec(record: ChatRecord | None) -> AssistantSpec:
    """Return the assistant of the chat, without fields that only a newer version knows."""
    noted = _known(AssistantSpec, record and record.further.get("assistant"))
    return AssistantSpec(**{**noted, "limits": _known(Limits, noted.get("limits"))})


def read_object(record: ChatRecord | None, name: str) -> Mapping[str, Any]:
    """Return the object that is stored with the chat under `name`, an empty one if none is."""
    kept = record.further.get(name) if record else None
    return kept if isinstance(kept, dict) else {}


def _known(kind: type[AssistantSpec | Limits], noted: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {each.name: noted[each.name] for each in fields(kind) if each.name in (noted or ())}


class ChatRecords:
    """The records of one data root. Several processes may use it.

    Every method may raise StorageUnavailable: the records cannot be read or written now.
    """

    def __init__(self, data_root: Path) -> None:
        self._notes = data_root / "sandbox" / "records"
        self._locks = data_root / "sandbox" / "locks"
        # Those of this machine, which have its chats' files.
        self.here: ChatRecords = self

    async def get(self, chat: ChatId) -> ChatRecord | None:
        """Return the chat's record, a new one if it is damaged. Needs the chat's lock (`hold`)."""
        return await self._run(self._get, chat)

    async def look(self, chat: ChatId) -> ChatRecord | None:
        """Return the chat's record as it is now; for callers without the chat's lock."""
        with suppress(ValueError):
            return await self._run(partial(_read, self._path(chat)), chat)
        return None

    async def put(self, record: ChatRecord) -> None:
        """Write a record, in place of the chat's earlier one. Needs the chat's lock (`hold`)."""
        await self._run(self._put, record)

    async def kept(self, chat: ChatId, name: str) -> Any:  # noqa: ANN401 - JSON of others
        """Return the value stored with a chat under `name`; None if there is none."""
        record = await self.look(chat)
        return record.further.get(name) if record else None

    async def keep(
        self, chat: ChatId, name: str, change: Callable[[Any], object], now_s: float
    ) -> None:
        """Replace the value stored under `name` by what `change` makes of it, under the lock."""
        async with self.hold(chat):
            record = await self.get(chat) or ChatRecord(chat, None, now_s, now_s)
            value = change(record.further.get(name))
            await self.put(replace(record, further={**record.further, name: value}))

    async def last_seen(self, chat: ChatId) -> Mapping[str, Any]:
        """Return what is noted of the sandbox that its agent saw last."""
        with suppress(ValueError):
            return await self._run(durable.read_note, self._path(chat, _SEEN)) or {}
        return {}

    async def note_last_seen(self, chat: ChatId, seen: Mapping[str, Any]) -> None:
        """Note it, unsynced; a failure is logged. Needs the chat's lock (`hold`)."""
        try:
            note = partial(durable.write_note, self._path(chat, _SEEN), synced=False)
            await self._run(note, seen)
        except StorageUnavailable as exc:
            logger.warning("chat %s: its agent may be told of its sandbox's end: %s", chat, exc)

    async def touch(self, used: Mapping[ChatId, float]) -> None:
        """Store when chats were last used; an earlier time than the known one changes nothing."""
        await self._run(self._touch, used)

    async def list(self) -> Sequence[ChatRecord]:
        """Return every record, the last used first."""
        return await self._run(self._list, self._notes)

    async def remove(self, chat: ChatId) -> None:
        """Forget a chat; an unknown one is not an error."""
        await self._run(self._remove, chat)

    @asynccontextmanager
    async def hold(self, chat: ChatId, *, at_once: bool = False) -> AsyncGenerator[bool]:
        """Hold the chat's lock, which ends with the process; yield whether it was got.

        It is not reentrant. `at_once`: do not wait, but yield False if another has it.

        Raises:
            BackendUnavailable: another server has had it for too long.
        """
        pause_s, longest_s = _LOOK_AGAIN_S
        until = anyio.current_time() + (0 if at_once else _LONG_S)
        while True:
            # A lock that a thread has taken must come back, or it would never be released.
            with anyio.CancelScope(shield=True):
                descriptor = await self._run(self._try, chat)
            if descriptor is not None or anyio.current_time() >= until:
                break
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        if descriptor is None and not at_once:
            raise BackendUnavailable(
                "another server of this data directory has been busy with the sandbox of chat "
                f"{chat} for {_LONG_S:g} s: see which one with `mcp-sandbox status`, and end it"
            )
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                durable.unlock(descriptor)

    def _try(self, chat: ChatId) -> int | None:
        path = self._locks / chat.user / f"{_PREFIX}{chat.chat}"
        try:
            return durable.lock(path, wait=False)
        except FileNotFoundError:
            durable.make_folder(path.parent)
            return durable.lock(path, wait=False)

    async def _run(self, work: Callable[[Any], T], about: object) -> T:
        try:
            return await to_thread.run_sync(work, about)
        except OSError as exc:
            raise StorageUnavailable(
                f"the records of chats cannot be used ({exc}): check the disk and the rights of "
                f"{self._notes}; the chats' files are not concerned"
            ) from exc

    def _path(self, chat: ChatId, suffix: str = _SUFFIX) -> Path:
        return self._notes / chat.user / f"{_PREFIX}{chat.chat}{suffix}"

    def _get(self, chat: ChatId) -> ChatRecord | None:
        path = self._path(chat)
        try:
            return _read(path, chat)
        except ValueError as exc:
            lost = _lost(path, chat)
            durable.set_aside(path, exc)
            # So that later calls, too, know that the backend was lost.
            self._put(lost)
            return lost

    def _put(self, record: ChatRecord) -> None:
        path = self._path(record.chat)
        durable.make_folder(path.parent)
        durable.write_note(path, _note(record))
        os.utime(path, (record.used_s, record.used_s))

    def _touch(self, used: Mapping[ChatId, float]) -> None:
        for chat, when in used.items():
            path = self._path(chat)
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < when:
                    os.utime(path, (when, when), follow_symlinks=False)

    def _list(self, root: Path) -> Sequence[ChatRecord]:
        users = (
            [entry.name for entry in os.scandir(root) if entry.is_dir()] if root.is_dir() else []
        )
        found = [record for user in users for record in _of_user(root / user, user)]
        return sorted(found, key=lambda record: record.used_s, reverse=True)

    def _remove(self, chat: ChatId) -> None:
        path = self._path(chat)
        self._path(chat, _SEEN).unlink(missing_ok=True)
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError as exc:
            durable.set_aside(path, exc.strerror)
        if path.parent.is_dir():
            # A record that came back after a power cut would be of a chat that is removed.
            durable.sync(path.parent)


class SharedRecords(ChatRecords):
    """The records that servers share; each has a copy of those of its chats.

    The lease of a chat stands above its lock: `hold` takes it, and may raise ChatElsewhere too.
    What is stored of backups is about the files of one machine. Under "newest" it has the epoch
    under which a server opened the chat last.
    """

    def __init__(self, data_root: Path, store: "FleetStore", leases: "Leases") -> None:
        super().__init__(data_root)
        self.here = ChatRecords(data_root)
        self._store = store
        self._leases = leases
        leases.write_record = self._share
        # The epochs of leases since whose beginning the copy is written along.
        self._written: dict[ChatId, int | None] = {}

    async def get(self, chat: ChatId) -> ChatRecord | None:
        return await self._joined(chat, await super().get(chat))

    async def look(self, chat: ChatId) -> ChatRecord | None:
        return await self._joined(chat, await super().look(chat))

    async def _joined(self, chat: ChatId, mine: ChatRecord | None) -> ChatRecord | None:
        epoch = self._leases.epoch(chat)
        if not self._leases.covers(chat) or (epoch and self._written.get(chat) == epoch):
            return mine
        found = await self._store.read(chat)
        return _join(chat, mine, found) if found else mine

    async def put(self, record: ChatRecord) -> None:
        if self._leases.covers(record.chat):
            await self._write(record)
            self._written[record.chat] = self._leases.epoch(record.chat)
        await super().put(record)

    async def keep(
        self, chat: ChatId, name: str, change: Callable[[Any], object], now_s: float
    ) -> None:
        keep = self.here.keep if name == BACKUP else super().keep
        await keep(chat, name, change, now_s)

    async def last_seen(self, chat: ChatId) -> Mapping[str, Any]:
        if self._leases.covers(chat):
            return read_object(await self.get(chat), _SEEN)
        return await super().last_seen(chat)

    async def note_last_seen(self, chat: ChatId, seen: Mapping[str, Any]) -> None:
        if not self._leases.covers(chat):
            await super().note_last_seen(chat, seen)
        elif self._leases.epoch(chat) and (record := await self.get(chat)):
            await self.put(replace(record, further={**record.further, _SEEN: seen}))

    async def _write(self, record: ChatRecord) -> None:
        note, kept = _note(record), read_object(record, BACKUP)
        if kept:
            epochs = (kept.get("epoch", 0), kept.get("newest", 0))
            note[BACKUP] = {**kept, "epoch": max(epochs)}
        await self._store.write(record.chat, note, record.used_s)

    async def _share(self, chat: ChatId) -> None:
        """Write this machine's copy of a record, which Redis has lost."""
        if record := await self.here.look(chat):
            await self._write(record)

    async def touch(self, used: Mapping[ChatId, float]) -> None:
        await super().touch(used)
        if shared := {chat: when for chat, when in used.items() if self._leases.covers(chat)}:
            await self._store.touch(shared)

    async def list(self) -> Sequence[ChatRecord]:
        found = {record.chat: record for record in await super().list()}
        for chat, stored in (await self._store.list()).items():
            if joined := _join(chat, found.get(chat), stored):
                found[chat] = joined
        return sorted(found.values(), key=lambda record: record.used_s, reverse=True)

    async def remove(self, chat: ChatId) -> None:
        if self._leases.covers(chat):
            await self._store.remove(chat)
            self._written.pop(chat, None)
        await super().remove(chat)

    @asynccontextmanager
    async def hold(self, chat: ChatId, *, at_once: bool = False) -> AsyncGenerator[bool]:
        async with super().hold(chat, at_once=at_once) as ours:
            if ours:
                await self._leases.hold(chat)
            try:
                yield ours
            finally:
                if ours:
                    await self._leases.release_ended(chat)


def _join(
    chat: ChatId, mine: ChatRecord | None, stored: tuple[dict[str, Any], float]
) -> ChatRecord | None:
    """Return what the servers share of a chat, with what this one has of its backups."""
    try:
        shared = _parse(chat, *stored)
    except ValueError:
        logger.warning("chat %s: its record in Redis is damaged, and passed over", chat)
        return mine
    kept, further = dict(read_object(mine, BACKUP)), dict(shared.further)
    if BACKUP in further:
        kept["newest"] = read_object(shared, BACKUP).get("epoch", 0)
        further[BACKUP] = kept
    return replace(shared, further=further)


def _of_user(folder: Path, user: str) -> Iterator[ChatRecord]:
    for name in os.listdir(folder):  # noqa: PTH208 - a Path for each costs more than the rest
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            path = f"{folder}/{name}"
            with suppress(InvalidArgument, FileNotFoundError):
                chat = ChatId(user, name[len(_PREFIX) : -len(_SUFFIX)])
                try:
                    record = _read(path, chat)
                except ValueError:
                    record = _lost(path, chat)
                if record:
                    yield record


def _lost(path: str | Path, chat: ChatId) -> ChatRecord:
    """Return what is known of a chat whose record is damaged."""
    used_s = os.lstat(path).st_mtime
    return ChatRecord(chat, None, created_s=used_s, used_s=used_s)


def _read(path: str | Path, chat: ChatId) -> ChatRecord | None:
    """Return the record in a file, if there is one; raises ValueError if it is damaged.

    Thousands are listed at once: so each file is opened only once.
    """
    found = durable.read_dated_note(path)
    return _parse(chat, *found) if found else None


def _note(record: ChatRecord) -> dict[str, Any]:
    return {
        **record.further,
        "backend": record.backend,
        "sandbox_id": record.sandbox_id,
        "image": record.image,
        "spec": record.spec,
        "created": record.created_s,
    }


def _parse(chat: ChatId, note: dict[str, Any], used_s: float) -> ChatRecord:
    """Return the record in a note; raises ValueError. What is left over others have written."""
    sandbox_id, image = note.pop("sandbox_id", None) or "", note.pop("image", None) or ""
    spec, created_s = note.pop("spec", ""), note.pop("created", used_s)
    texts = isinstance(sandbox_id, str) and isinstance(image, str) and isinstance(spec, str)
    if not (texts and isinstance(created_s, int | float)):
        raise ValueError("its fields are of other kinds")
    if not 0 <= created_s < _LATEST_S:
        raise ValueError("it was not made at such a time")
    backend, bound = note.pop("backend", None), SandboxId(sandbox_id) if sandbox_id else None
    known = backend if backend in _BACKENDS else None
    return ChatRecord(chat, known, created_s, used_s, bound, image or None, spec, note)


def system_clock() -> Moment:
    """Return the time now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


class UseTimes:
    """The times of use that one process knows. A failed write is tried again."""

    def __init__(self, records: ChatRecords, clock: Clock = system_clock) -> None:
        self.records = records
        self.clock = clock
        self._unwritten: dict[ChatId, float] = {}
        self._used_at: dict[ChatId, float] = {}
        self._failing = False

    def note_use(self, chat: ChatId) -> None:
        """Note that the chat is used now. Cheap: it is written later."""
        now = self.clock()
        self._used_at[chat], self._unwritten[chat] = now.steady_s, now.wall_s

    def idle_s(self, chat: ChatId) -> float:
        """Return how long ago this process used the chat; a chat's first question counts as use."""
        now_s = self.clock().steady_s
        return now_s - self._used_at.setdefault(chat, now_s)

    def used_s(self, chat: ChatId) -> float | None:
        """Return when this process used the chat last, by the steady clock."""
        return self._used_at.get(chat)

    def times(self, chat: ChatId, known: ChatRecord | None) -> tuple[datetime, datetime]:
        """Return when it began and was used last, in UTC; now, if that is unknown."""
        created_s = known.created_s if known else self.clock().wall_s
        used_s = self._unwritten.get(chat) or (known.used_s if known else created_s)
        return datetime.fromtimestamp(created_s, UTC), datetime.fromtimestamp(used_s, UTC)

    def forget(self, chat: ChatId) -> None:
        """Forget the times of a removed chat."""
        self._unwritten.pop(chat, None)
        self._used_at.pop(chat, None)

    async def write(self) -> None:
        used, self._unwritten = self._unwritten, {}
        written = False
        try:
            await self.records.touch(used)
            written, self._failing = True, False
        except StorageUnavailable as exc:
            # Logged once: it is tried again every few seconds.
            if not self._failing:
                logger.warning("%s; trying again until it works", exc)
            self._failing = True
        finally:
            if not written:
                self._unwritten = {**used, **self._unwritten}
