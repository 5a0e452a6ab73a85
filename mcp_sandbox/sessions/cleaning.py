"""Removes what is over: old files and trash, left sandboxes, open ones that nobody uses.

Which files are due is decided in workspace.retention; this looks, and does it. What is in use is
not ended: the hold asks the runner, which knows of every server.

    {data root}/sandbox/clock    the last moment a process saw, and in which run of the machine
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import anyio
from anyio import to_thread

from mcp_sandbox.backends.process import boot_id
from mcp_sandbox.config import SessionsConfig
from mcp_sandbox.durable import read_note, set_aside, write_note
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.records import ChatRecord
from mcp_sandbox.sessions.rooms import Rooms, Use
from mcp_sandbox.sessions.settings import SessionSettings, of_chats
from mcp_sandbox.workspace.directory import TRASH_KEPT_S
from mcp_sandbox.workspace.retention import (
    WATCHED_S,
    Age,
    Ages,
    Due,
    Moment,
    credible,
    due,
    in_words,
    is_time,
    outdated,
)

logger = logging.getLogger(__name__)

Step = Literal["bury", "expire", "remove"]

_LOOK_S = 15.0
_LOOK_LEAST_S = 0.5
_FILES_S = 30.0
_TIDY_S = 3600.0


@dataclass(frozen=True)
class GcItem:
    """Something that is, or would be, removed; `what` is a chat, as "user/chat", where known.

    kind: the files of a chat, what was thrown away before, or a sandbox that no chat needs.
    """

    kind: Literal["workspace", "trash", "sandbox"]
    what: str
    why: str
    size_bytes: int


@dataclass(frozen=True)
class GcReport:
    """What was removed; after a dry run, what would be. A workspace goes to the trash first."""

    dry_run: bool
    items: tuple[GcItem, ...]


class _Seen(NamedTuple):
    chats: Mapping[ChatId, Age]
    trash: Mapping[str, Age]
    records: Mapping[ChatId, ChatRecord]


class Cleaning:
    """Looks again and again, so that it knows how old things are whatever a clock says.

    Every method may raise OperatorError: the data root or the engine cannot be used.
    """

    def __init__(self, rooms: Rooms, own: Callable[[], Collection[ChatId]]) -> None:
        """`own` are the chats that this server uses, or is about to."""
        self._backend = rooms.backend
        self._workspaces = rooms.workspaces
        self._records = rooms.records
        self.ledger = rooms.ledger
        self._settings = rooms.settings
        self._own = own
        self._clock_file = rooms.workspaces.data_root / "sandbox" / "clock"
        self._ages: tuple[Moment, Ages[ChatId], Ages[str]] | None = None

    async def tidy(self, *, watched_s: float = 0.0) -> None:
        """Take in what there is, and empty the trash of what is due."""
        seen = await self._look()
        await self._empty_trash(seen, watched_s, dry_run=False)

    async def collect(self, *, dry_run: bool = False, watched_s: float = 0.0) -> GcReport:
        """Remove what is due and was watched for so long, or with `dry_run` only say what is."""
        seen = await self._look()
        items = await self._end_left(seen, dry_run)
        in_use, keep_s = await self._in_use(), self._settings.workspace.retention
        found = due(seen.chats, keep_s=keep_s, in_use=in_use, watched_s=watched_s)
        items += [item for one in found if (item := await self._take(one, seen, dry_run))]
        items += await self._empty_trash(seen, watched_s, dry_run)
        return GcReport(dry_run, tuple(items))

    async def end_paused(self) -> None:
        """End what was paused by a server that is gone, and not used for long."""
        await self._end_left(await self._look(), dry_run=False, paused_only=True)

    async def end_leftover(self, sandbox_id: SandboxId, chat: ChatId) -> bool:
        """End a sandbox unless its chat has files, or got some meanwhile; whether it did."""
        async with self._records.hold(chat):
            if await self._workspaces.exist(chat):
                return False
            logger.info("removing sandbox %s: chat %s has no files", sandbox_id, chat)
            await self._backend.destroy(sandbox_id)
        return True

    async def _look(self) -> _Seen:
        now = self.ledger.clock()
        if self._ages is None:
            anchor = await to_thread.run_sync(_recall, self._clock_file, now)
            self._ages = anchor, Ages(anchor), Ages(anchor)
        anchor, chat_ages, trash_ages = self._ages
        # Before the directories: a record that comes in between has its directory.
        await self.ledger.write()
        records = {record.chat: record for record in await self._records.list()}
        items = await self._workspaces.trashed(measured=False)
        chats = await self._workspaces.chats()
        for chat in {*chats, *records} - (set(chats) & set(records)):
            await self._correct(chat, now)
        await to_thread.run_sync(_remember, self._clock_file, now, anchor)
        stamps = {chat: records[chat].used_s if chat in records else None for chat in chats}
        return _Seen(
            chat_ages.look(stamps, now),
            trash_ages.look({item.name: item.discarded_at for item in items}, now),
            records,
        )

    async def _correct(self, chat: ChatId, now: Moment) -> None:
        """Make the record of a chat that has files and none, or remove that of one without."""
        async with self._records.hold(chat, at_once=True) as ours:
            if ours and not await self._workspaces.exist(chat):
                await self._records.remove(chat)
                self.ledger.forget(chat)
            elif ours and await self._records.get(chat) is None:
                # When it was used last is unknown: that counts as now.
                here = self._backend.name
                lived = here if here == "unsafe-local" else None
                await self._records.put(ChatRecord(chat, lived, now.wall_s, now.wall_s))

    async def _take(self, one: Due, seen: _Seen, dry_run: bool) -> GcItem | None:
        """Throw a chat's files into the trash, unless it was used since it was looked at."""
        chat = one.chat
        size = (await self._workspaces.meter(chat).usage()).used_bytes
        item = GcItem("workspace", str(chat), one.why, size)
        if dry_run:
            return item
        async with self._records.hold(chat):
            await self.ledger.write()
            used = chat in await self._in_use()
            if used or await self._records.get(chat) != seen.records.get(chat):
                return None
            await self._workspaces.remove(chat)
            await self._records.remove(chat)
        self.ledger.forget(chat)
        logger.info("chat %s: its files are in the trash, it was not used for long", chat)
        return item

    async def _in_use(self) -> Collection[ChatId]:
        return {*self._own(), *(chat for chat, _ in await of_chats(self._backend))}

    async def _end_left(
        self, seen: _Seen, dry_run: bool, *, paused_only: bool = False
    ) -> list[GcItem]:
        items: list[GcItem] = []
        paused_s = self._settings.sessions.remove_after
        for chat, info in await of_chats(self._backend):
            age = seen.chats.get(chat)
            if age is None and not paused_only:
                why = "runs for a chat that has no files"
                ended = dry_run or await self.end_leftover(info.id, chat)
            elif age and info.state == "paused" and age.idle_s >= paused_s:
                why = f"paused, and not used for {in_words(age.idle_s)} (sessions.remove_after)"
                ended = dry_run or await self._end_paused(info.id, chat)
            else:
                continue
            items += [GcItem("sandbox", str(chat), why, 0)] if ended else []
        return items

    async def _end_paused(self, sandbox_id: SandboxId, chat: ChatId) -> bool:
        async with self._records.hold(chat):
            paused = [info.id for info in await self._backend.running() if info.state == "paused"]
            if sandbox_id in paused:
                logger.info("removing sandbox %s of chat %s: paused for long", sandbox_id, chat)
                await self._backend.destroy(sandbox_id)
        return sandbox_id in paused

    async def _empty_trash(self, seen: _Seen, watched_s: float, dry_run: bool) -> list[GcItem]:
        found: list[GcItem] = []
        old = set(outdated(seen.trash, TRASH_KEPT_S, watched_s))
        if not old:
            return found
        items = [item for item in await self._workspaces.trashed() if item.name in old]
        if not dry_run:
            gone, stuck = await self._workspaces.empty_trash(is_due=old.__contains__)
            if stuck:
                logger.warning("the trash holds what cannot be deleted: %s", stuck)
            items = [item for item in items if item.name in gone]
        kept = in_words(TRASH_KEPT_S)
        for item in items:
            why = f"discarded {in_words(seen.trash[item.name].idle_s)} ago; kept for {kept}"
            found.append(GcItem("trash", str(item.chat or item.name), why, item.allocated_bytes))
        return found


def _recall(file: Path, now: Moment) -> Moment:
    """The last moment that was remembered since the machine started; `now` if none was."""
    try:
        said = read_note(file)
        if said is None or said["boot"] != boot_id():
            return now
        anchor = Moment(float(said["wall_s"]), float(said["steady_s"]))
    except (ValueError, KeyError, TypeError) as exc:
        set_aside(file, exc)
        return now
    return anchor if anchor.steady_s <= now.steady_s else now


def _remember(file: Path, now: Moment, anchor: Moment) -> None:
    """Keep `now`, as far as it can be believed, for the next process."""
    seen = credible(now, anchor)
    said = {"boot": boot_id(), "wall_s": seen.wall_s, "steady_s": seen.steady_s}
    try:
        # It counts in this run of the machine alone.
        write_note(file, said, synced=False)
    except OSError as exc:
        logger.warning("the time could not be written down for the next server: %s", exc)


def next_step(use: Use, idle_s: float, settings: SessionsConfig) -> Step | None:
    """What is to be done with an open sandbox that this server has not used for `idle_s`."""
    if use.starting or use.calls:
        return None
    if use.dead:
        return "bury"
    if use.age_s >= settings.lifetime:
        return "expire"
    return "remove" if idle_s >= settings.remove_after else None


class Reaper:
    """Looks after the open sandboxes and the old files of one data root."""

    def __init__(
        self, open_ones: Callable[[], Sequence[Hold]], cleaning: Cleaning, settings: SessionSettings
    ) -> None:
        self._open_ones = open_ones
        self._ledger = cleaning.ledger
        self._cleaning = cleaning
        self._settings = settings
        self._begun_s = cleaning.ledger.clock().steady_s
        self._tidied_s: float | None = None
        self._collected: datetime | None = None
        shortest = min(settings.sessions.remove_after, settings.sessions.lifetime)
        self._interval_s = min(_LOOK_S, max(_LOOK_LEAST_S, shortest / 4))

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_files)
            while True:
                await self.look()
                await anyio.sleep(self._interval_s)

    async def look(self) -> None:
        """Do for the sandboxes what is to be done now, and write down what happened."""
        async with anyio.create_task_group() as tasks:
            # One whose engine does not answer holds up none of the others.
            for kept in self._open_ones():
                tasks.start_soon(self._care, kept)
        await self._ledger.write()

    async def look_at_files(self) -> None:
        """Do for old files what is to be done now; this may take long."""
        now = self._ledger.clock()
        try:
            if self._is_due(now):
                await self._cleaning.collect(watched_s=WATCHED_S)
            elif self._tidied_s is None or now.steady_s - self._tidied_s >= _TIDY_S:
                self._tidied_s = now.steady_s
                await self._cleaning.tidy(watched_s=WATCHED_S)
        except SandboxError:
            logger.exception("old files could not be looked at; trying again later")

    def _is_due(self, now: Moment) -> bool:
        """Whether it is the hour of the schedule.

        What is due by that is also removed once soon after the start: many a server does not live
        until its hour.
        """
        local = datetime.fromtimestamp(now.wall_s)
        if self._collected is None:
            is_due = now.steady_s - self._begun_s >= WATCHED_S
        else:
            # After the clock was put back, its next turn is the next by the new time.
            self._collected = min(self._collected, local)
            is_due = is_time(self._settings.workspace.cleanup, self._collected, local)
        if is_due:
            self._collected, self._tidied_s = local, now.steady_s
        return is_due

    async def _run_files(self) -> None:
        while True:
            # Not at once: the first call comes first.
            await anyio.sleep(_FILES_S)
            await self.look_at_files()

    async def _care(self, kept: Hold) -> None:
        use = kept.use()
        if use.calls or (use.background and not use.paused):
            self._ledger.used(kept.chat)
        try:
            step = next_step(use, self._ledger.idle_s(kept.chat), self._settings.sessions)
            if step == "expire":
                await kept.yield_up(background_too=True)
            elif step and not await kept.yield_up(background_too=use.paused):
                self._ledger.used(kept.chat)
        except SandboxError:
            logger.exception("chat %s: its sandbox could not be looked after", kept.chat)
