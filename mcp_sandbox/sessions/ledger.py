"""What is known of every chat, kept in memory and written to the store behind the calls.

The store may fail at any time: then what would have been written is kept, and tried again.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import anyio

from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import BackendName, ChatId, SandboxId, SessionState
from mcp_sandbox.sessions.clock import Clock
from mcp_sandbox.sessions.listing import Times, session_id
from mcp_sandbox.sessions.store import SessionRecord, SessionStore

logger = logging.getLogger(__name__)


class Ledger:
    """The records of one data root, as this process knows them."""

    def __init__(self, store: SessionStore, backend: BackendName, clock: Clock) -> None:
        self._store = store
        self._backend = backend
        self.clock = clock
        self._records: dict[ChatId, SessionRecord] = {}
        # To be written: whole records, times of use, and chats to forget.
        self._changed: set[ChatId] = set()
        self._used: dict[ChatId, float] = {}
        self._removed: set[ChatId] = set()
        self._used_at: dict[ChatId, float] = {}
        self._failing = False
        # What is read in the midst of a writing would be the state before it.
        self._turn = anyio.Lock()
        self._news = anyio.Event()

    def get(self, chat: ChatId) -> SessionRecord | None:
        """The chat's record, as far as this process knows."""
        return self._records.get(chat)

    def times(self, chat: ChatId) -> Times:
        """When it began and was used last; now, where nobody knows."""
        known = self._records.get(chat) or self._new(chat)
        used = self._used.get(chat)
        last = known.last_used_at if used is None else datetime.fromtimestamp(used, UTC)
        return Times(known.created_at, last)

    def all(self) -> Sequence[SessionRecord]:
        """Every record, the last used first."""
        return sorted(self._records.values(), key=lambda record: record.last_used_at, reverse=True)

    async def news(self) -> None:
        """Return when something was noted since the last time; for one who waits."""
        await self._news.wait()
        self._news = anyio.Event()

    def used(self, chat: ChatId) -> None:
        """It is used just now. Costs nothing: it is written later."""
        now = self.clock()
        self._used_at[chat], self._used[chat] = now.steady_s, now.wall_s

    def idle_s(self, chat: ChatId) -> float:
        """How long ago this process used the chat last; 0 from when it is asked for first."""
        now_s = self.clock().steady_s
        return now_s - self._used_at.setdefault(chat, now_s)

    def note(
        self,
        chat: ChatId,
        state: SessionState,
        *,
        sandbox_id: SandboxId | None = None,
        image: str | None = None,
        spec: str | None = None,
    ) -> None:
        """Its state is another one. Without `image` and `spec` they stay what they were."""
        known = self._records.get(chat) or self._new(chat)
        self._records[chat] = replace(
            known,
            backend=self._backend,
            state=state,
            sandbox_id=sandbox_id,
            image=known.image if image is None else image,
            spec=known.spec if spec is None else spec,
        )
        self._changed.add(chat)
        self._removed.discard(chat)
        self._news.set()

    def forget(self, chat: ChatId) -> None:
        """It exists no longer."""
        for known in (self._records, self._used, self._used_at):
            known.pop(chat, None)
        self._changed.discard(chat)
        self._removed.add(chat)
        self._news.set()

    async def read(self) -> None:
        """Take in what other processes wrote; a store that cannot be read changes nothing."""
        async with self._turn:
            await self._read()

    async def _read(self) -> None:
        try:
            found = {record.chat: record for record in await self._store.all()}
        except StorageUnavailable as exc:
            self._fail(exc)
            return
        unwritten = {chat: self._records[chat] for chat in self._changed}
        # What the store lost is still known here.
        for chat in self._records.keys() - found.keys() - unwritten.keys():
            if chat in self._used_at:
                unwritten[chat] = self._records[chat]
                self._changed.add(chat)
        self._records = {**found, **{c: _joined(found.get(c), r) for c, r in unwritten.items()}}
        for chat in self._removed:
            self._records.pop(chat, None)

    async def write(self) -> None:
        """Write what there is to write; what cannot be written now stays for the next time."""
        async with self._turn:
            await self._write_all()

    async def _write_all(self) -> None:
        used, self._used = self._used, {}
        changed, self._changed = self._changed, set()
        removed, self._removed = self._removed, set()
        times = {chat: datetime.fromtimestamp(when, UTC) for chat, when in used.items()}
        for chat, when in times.items():
            if record := self._records.get(chat):
                self._records[chat] = replace(record, last_used_at=when)
        written = False
        try:
            await self._write(changed, removed, times)
            written, self._failing = True, False
        except StorageUnavailable as exc:
            self._fail(exc)
        finally:
            if not written:
                self._used = {**used, **self._used}
                self._changed |= changed - self._removed
                self._removed |= removed - self._changed

    async def _write(
        self, changed: set[ChatId], removed: set[ChatId], used: Mapping[ChatId, datetime]
    ) -> None:
        for chat in removed:
            await self._store.remove(chat)
        for chat in changed:
            if record := self._records.get(chat):
                await self._store.put(record)
        if used:
            await self._store.touch(used)

    def _new(self, chat: ChatId) -> SessionRecord:
        now = self._now()
        return SessionRecord(
            id=session_id(chat),
            chat=chat,
            backend=self._backend,
            sandbox_id=None,
            state="warm",
            created_at=now,
            last_used_at=now,
            image=None,
            spec="",
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock().wall_s, UTC)

    def _fail(self, problem: StorageUnavailable) -> None:
        # Once: it is tried again every few seconds.
        if not self._failing:
            logger.warning("%s; trying again until it works", problem)
        self._failing = True


def _joined(stored: SessionRecord | None, ours: SessionRecord) -> SessionRecord:
    """What the store will hold when it is given our record."""
    if stored is None:
        return ours
    return replace(
        ours,
        created_at=min(stored.created_at, ours.created_at),
        last_used_at=max(stored.last_used_at, ours.last_used_at),
    )
