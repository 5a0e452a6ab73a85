"""Removes old files, trash, leftover sandboxes and open sandboxes that are idle.

workspace.retention decides which files are due; this module looks, and removes them. A sandbox in
use is not ended: its `ChatSandbox` asks the runner, which knows the connections of every server.

    {data root}/sandbox/clock    the latest time that a process saw, and the boot id of then
"""

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import anyio
from anyio import to_thread

from mcp_sandbox.backends.sandbox_records import boot_id
from mcp_sandbox.config import SessionsConfig
from mcp_sandbox.durable import read_note, set_aside, write_note
from mcp_sandbox.errors import ChatElsewhere, SandboxError
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.chat_records import BACKUP, ChatRecord, read_object
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
from mcp_sandbox.sessions.sandbox.context import ChatUse, SessionContext
from mcp_sandbox.sessions.settings import SessionSettings, list_chat_sandboxes
from mcp_sandbox.workspace.directory import TRASH_KEPT_S
from mcp_sandbox.workspace.retention import (
    WATCHED_S,
    Age,
    Ages,
    DueChat,
    Moment,
    in_words,
    is_time,
    limit_wall_clock,
    list_due_chats,
    list_outdated,
)

logger = logging.getLogger(__name__)

Step = Literal["discard", "expire", "remove"]

_LOOK_S = 15.0
_LOOK_LEAST_S = 0.5
_FILES_S = 30.0
_TIDY_S = 3600.0


@dataclass(frozen=True)
class GcItem:
    """Something that is, or would be, removed; `what` is a chat, as "user/chat", where known.

    kind: the files of a chat, what was discarded before, or a sandbox that no chat needs.
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
    unsaved: Collection[ChatId]


class Cleaner:
    """Looks regularly, so that it knows how old things are even if the clock was changed.

    Every method may raise OperatorError: the data root or the engine cannot be used.
    """

    def __init__(
        self,
        context: SessionContext,
        own: Callable[[], Collection[ChatId]],
        adopt: Callable[[ChatId, SandboxId], Awaitable[object]],
    ) -> None:
        """`own` are the chats that this server uses, or is about to; `adopt` opens a sandbox."""
        self._backend = context.backend
        self._workspaces = context.workspaces
        self._lost_with_sandbox = context.files.lost_with_sandbox
        # Other servers may have what is on no host.
        shared = context.records
        self._records = shared if self._lost_with_sandbox else shared.here
        self.ledger = context.use_times
        self._settings = context.settings
        self._saving = context.saving
        self._used_elsewhere = context.used_elsewhere
        self._own, self._adopt = own, adopt
        self._clock_file = context.workspaces.data_root / "sandbox" / "clock"
        self._ages: tuple[Moment, Ages[ChatId], Ages[str]] | None = None

    async def tidy(self, *, watched_s: float = 0.0) -> None:
        """Look at what there is, and empty the trash of what is due."""
        seen = await self._look()
        await self._empty_trash(seen, watched_s, dry_run=False)

    async def collect(self, *, dry_run: bool = False, watched_s: float = 0.0) -> GcReport:
        """Remove what is due and was watched for `watched_s`; with `dry_run` only report it."""
        seen = await self._look()
        items = await self.end_left(seen, dry_run)
        in_use = {*await self._in_use(), *seen.unsaved, *await self._used_elsewhere(seen.chats)}
        keep_s = self._settings.workspace.retention
        found = list_due_chats(seen.chats, keep_s=keep_s, in_use=in_use, watched_s=watched_s)
        for one in found:
            with suppress(ChatElsewhere):
                items += await self._take(one, seen, dry_run)
        items += await self._empty_trash(seen, watched_s, dry_run)
        return GcReport(dry_run, tuple(items))

    async def _look(self) -> _Seen:
        now = self.ledger.clock()
        if self._ages is None:
            anchor = await to_thread.run_sync(_recall, self._clock_file, now)
            self._ages = anchor, Ages(anchor), Ages(anchor)
        anchor, chat_ages, trash_ages = self._ages
        # Before the directories are listed, which come into being before their records.
        await self.ledger.write()
        records = {record.chat: record for record in await self._records.list()}
        items = await self._workspaces.trashed(measured=False)
        chats = await self._workspaces.chats()
        for chat in {*chats, *records} - (set(chats) & set(records)):
            await self._correct(chat, now)
        await to_thread.run_sync(_remember, self._clock_file, now, anchor)
        stamps = {chat: records[chat].used_s if chat in records else None for chat in chats}
        unsaved = {
            chat
            for chat in chats
            if self._saving and not read_object(records.get(chat), BACKUP).get("clean")
        }
        return _Seen(
            chat_ages.look(stamps, now),
            trash_ages.look(
                {item.name: item.discarded_at for item in items if item.chat not in unsaved}, now
            ),
            records,
            unsaved,
        )

    async def _correct(self, chat: ChatId, now: Moment) -> None:
        """Make the record of a chat that has only files, or remove that of a chat without."""
        async with self._records.hold(chat, at_once=True) as ours:
            record = await self._records.get(chat) if ours else None
            if ours and not await self._workspaces.exist(chat):
                if not (record and self._is_awaited(record, now)):
                    await self._forget(chat)
            elif ours and record is None:
                # The time of its last use is unknown: that counts as now.
                here = self._backend.name
                lived = here if here == "unsafe-local" else None
                await self._records.put(ChatRecord(chat, lived, now.wall_s, now.wall_s))

    def _is_awaited(self, record: ChatRecord, now: Moment) -> bool:
        """Return whether something that is kept of a chat without files is not over yet."""
        usual_s = record.used_s + (self._settings.workspace.retention or math.inf)
        kept = [value for name, value in record.further.items() if value and name != BACKUP]
        # Questions, answers and grants are lists, each with its own end.
        parts = [each for value in kept for each in (value if isinstance(value, list) else [{}])]
        return any(each.get("until_s", usual_s) > now.wall_s for each in parts)

    async def _take(self, one: DueChat, seen: _Seen, dry_run: bool) -> list[GcItem]:
        """Move a chat's files to the trash, unless it was used since `seen`."""
        chat = one.chat
        size = (await self._workspaces.open_disk_usage(chat).usage()).used_bytes
        item = GcItem("workspace", str(chat), one.why, size)
        if dry_run:
            return [item]
        async with self._records.hold(chat):
            await self.ledger.write()
            used = {*await self._in_use(), *await self._used_elsewhere([chat])}
            if chat in used or await self._records.get(chat) != seen.records.get(chat):
                return []
            record = seen.records.get(chat)
            if self._saving and self._lost_with_sandbox and record:
                # Without its record nothing here would look for them again; others may have more.
                await self._saving.remove(chat, line=record)
            if self._backend.keeps_paused_files:
                for other, info in await list_chat_sandboxes(self._backend):
                    if other == chat:
                        await self._backend.destroy(info.id)
            await self._workspaces.remove(chat)
            await self._forget(chat)
        logger.info("chat %s: its files are in the trash, it was not used for long", chat)
        return [item]

    async def _forget(self, chat: ChatId) -> None:
        """Remove the record of a chat without files here, unless it says that it has backups."""
        if self._lost_with_sandbox or not (
            self._saving and "saved" in read_object(await self._records.get(chat), BACKUP)
        ):
            await self._records.remove(chat)
        self.ledger.forget(chat)

    async def _in_use(self) -> Collection[ChatId]:
        # What keeps files while it is paused is part of these, and no use of them.
        rests = "paused" if self._backend.keeps_paused_files else ""
        found = await list_chat_sandboxes(self._backend)
        return {*self._own(), *(chat for chat, info in found if info.state != rests)}

    async def end_left(self, seen: _Seen | None = None, dry_run: bool = False) -> list[GcItem]:
        """End what a server that is gone has left: paused for long, or of chats without files."""
        seen, items = seen or await self._look(), list[GcItem]()
        paused_s = self._settings.sessions.remove_after
        for chat, info in await list_chat_sandboxes(self._backend):
            age = seen.chats.get(chat)
            is_old = age and info.state == "paused" and age.idle_s >= paused_s
            if self._lost_with_sandbox:
                is_old = is_old and not self._backend.keeps_paused_files
                if (age is None or is_old) and not dry_run:
                    await self._take_over(info.id, chat)
                continue
            why = "runs for a chat that has no files" if age is None else ""
            if age and is_old:
                why = f"paused, and not used for {in_words(age.idle_s)} (sessions.remove_after)"
            if why and (dry_run or await self._end_sandbox(info.id, chat, why)):
                items.append(GcItem("sandbox", str(chat), why, 0))
        return items

    async def _take_over(self, sandbox_id: SandboxId, chat: ChatId) -> None:
        """Open a sandbox that may have the only copy of files: it ends when these are saved."""
        if chat not in self._own():
            try:
                await self._adopt(chat, sandbox_id)
            except SandboxError as exc:
                logger.warning("chat %s: its sandbox stays as it is: %s", chat, exc)

    async def _end_sandbox(self, sandbox_id: SandboxId, chat: ChatId, why: str) -> bool:
        """End a sandbox unless it was resumed meanwhile, or its chat got files."""
        async with self._records.hold(chat):
            states = {info.id: info.state for info in await self._backend.running()}
            is_paused = states.get(sandbox_id) == "paused"
            is_due = is_paused or not await self._workspaces.exist(chat)
            if is_due:
                logger.info("removing sandbox %s of chat %s: %s", sandbox_id, chat, why)
                await self._backend.destroy(sandbox_id)
        return is_due

    async def _empty_trash(self, seen: _Seen, watched_s: float, dry_run: bool) -> list[GcItem]:
        found: list[GcItem] = []
        old = set(list_outdated(seen.trash, TRASH_KEPT_S, watched_s))
        if not old:
            return found
        items = [item for item in await self._workspaces.trashed() if item.name in old]
        if not dry_run:
            gone, stuck = await self._workspaces.empty_trash(is_due=old.__contains__)
            if stuck:
                logger.warning("these cannot be deleted from the trash: %s", stuck)
            items = [item for item in items if item.name in gone]
        kept = in_words(TRASH_KEPT_S)
        for item in items:
            why = f"discarded {in_words(seen.trash[item.name].idle_s)} ago; kept for {kept}"
            found.append(GcItem("trash", str(item.chat or item.name), why, item.allocated_bytes))
        return found


def _recall(file: Path, now: Moment) -> Moment:
    """Return the time that was stored last since the machine started; `now` if none was."""
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
    """Store `now`, as far as it is credible, for the next process."""
    seen = limit_wall_clock(now, anchor)
    said = {"boot": boot_id(), "wall_s": seen.wall_s, "steady_s": seen.steady_s}
    try:
        # It is of use only until the machine restarts.
        write_note(file, said, synced=False)
    except OSError as exc:
        logger.warning("the time could not be stored for the next server: %s", exc)


def next_step(use: ChatUse, idle_s: float, settings: SessionsConfig) -> Step | None:
    """Return what to do with an open sandbox that this server has not used for `idle_s`."""
    if use.starting or use.calls:
        return None
    if use.dead:
        return "discard"
    if use.age_s >= settings.lifetime:
        return "expire"
    return "remove" if idle_s >= settings.remove_after else None


class Reaper:
    """Looks after the open sandboxes and the old files of one data root."""

    def __init__(
        self,
        open_ones: Callable[[], Sequence[ChatSandbox]],
        cleaning: Cleaner,
        settings: SessionSettings,
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
        """End the sandboxes that are due now, and store the times of use."""
        async with anyio.create_task_group() as tasks:
            # One whose engine does not answer must not delay the others.
            for kept in self._open_ones():
                tasks.start_soon(self._care, kept)
        await self._ledger.write()

    async def look_at_files(self) -> None:
        """Remove the old files that are due now; this may take long."""
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
        """Return whether the scheduled time has come.

        Also once, soon after the start: many servers do not live until their scheduled time.
        """
        local = datetime.fromtimestamp(now.wall_s)
        if self._collected is None:
            is_due = now.steady_s - self._begun_s >= WATCHED_S
        else:
            # After the clock was set back, the next time is the next by the new clock.
            self._collected = min(self._collected, local)
            is_due = is_time(self._settings.workspace.cleanup, self._collected, local)
        if is_due:
            self._collected, self._tidied_s = local, now.steady_s
        return is_due

    async def _run_files(self) -> None:
        while True:
            # Not at once: the first call is not to wait for it.
            await anyio.sleep(_FILES_S)
            await self.look_at_files()

    async def _care(self, kept: ChatSandbox) -> None:
        use = kept.use()
        if use.calls or (use.background and not use.paused):
            self._ledger.note_use(kept.chat)
        try:
            step = next_step(use, self._ledger.idle_s(kept.chat), self._settings.sessions)
            if step == "expire":
                await kept.release_if_idle(background_too=True)
            elif step and not await kept.release_if_idle(background_too=use.paused):
                self._ledger.note_use(kept.chat)
        except SandboxError:
            logger.exception("chat %s: cannot check its sandbox; trying again", kept.chat)
