"""When the files of chats are saved to the object store, and when they come back from there.

A chat that was called is saved a while after its last call, regularly while it is used, and before
a person pauses or ends its sandbox. Before a sandbox opens, a backup is restored where the chat's
files are not on this machine, or where those here give way to it. The chat's record has, under
"backup", beside what `storage.descent` notes of saves:

    epoch   grows whenever a data root takes the chat over: files of a lower one are older; where
            servers share chats it is that of the chat's lease
    saved   when they were saved last, in seconds since the epoch
    clean   whether nothing has changed since; False while a sandbox is open
    told    of which other lines the agent was told
"""

import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import anyio

from mcp_sandbox import errors
from mcp_sandbox.config.sections import StorageConfig
from mcp_sandbox.errors import SandboxError, StorageUnavailable
from mcp_sandbox.models import ChatId, Mount
from mcp_sandbox.runtime.files import ROOTS, Files
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_records import BACKUP, ChatRecord, read_assistant_spec, read_object
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox, NothingRuns
from mcp_sandbox.sessions.sandbox.context import SessionContext
from mcp_sandbox.sessions.sandbox.warm_pool import connect
from mcp_sandbox.storage import descent
from mcp_sandbox.storage.backups import Backup, Backups, ListOld, NewSave
from mcp_sandbox.storage.breaker import CircuitBreaker
from mcp_sandbox.workspace.directory import ChatDirectories, name_server
from mcp_sandbox.workspace.projects import PROJECT, TARGET

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_AT_ONCE = 2
_MOST_PAUSE_S = 20.0
_DESTROY_S = 20.0
_MOST_TOLD = 8
_NEVER_SAVED = (
    "Another server has had this chat since these files were saved, and has saved nothing of it: "
    "what was written or installed there, if anything, is lost."
)

BackupState = Mapping[str, Any]
Change = Callable[[BackupState], BackupState]


@dataclass
class ChatState:
    """What this server knows of a chat's files; `changed_s`: since when they are not saved.

    `calls` may have changed them, the last one at `called_s`. Times are by the steady clock.
    `wanted`: what a person has the next opening restore, `due`: what is to be restored by descent.
    `is_behind`: newer files are in the store. `line`: the saves that the files here come from.
    `found` and `kept`: what the store and the record have, as read last.
    """

    epoch: int = 1
    changed_s: float | None = None
    called_s: float = 0.0
    calls: int = 0
    saved_at: datetime | None = None
    wanted: Sequence[Backup] = ()
    due: Sequence[Backup] = ()
    is_behind: bool = False
    line: descent.Keys = frozenset()
    found: Sequence[Backup] = ()
    kept: BackupState = field(default_factory=dict[str, Any])
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(most_s=_MOST_PAUSE_S))

    def describe(self, before: BackupState, *, clean: bool) -> BackupState:
        saved = {"saved": self.saved_at.timestamp()} if self.saved_at else {}
        return {**before, **saved, "epoch": self.epoch, "clean": clean}


class Saving:
    """The backups of all chats of one manager.

    What asks the store may raise StorageUnavailable; what opens a sandbox, whatever that raises.
    """

    def __init__(self, backups: Backups, settings: StorageConfig, context: SessionContext) -> None:
        self._backups = backups
        self._settings = settings
        self._context = context
        self._chats = defaultdict[ChatId, ChatState](ChatState)
        self._lines = _Lines(context)
        self._prune = partial(backups.prune, unused_s=context.settings.workspace.retention)
        self._places = anyio.CapacityLimiter(_AT_ONCE)
        self._now_s: Callable[[], float] = lambda: context.use_times.clock().steady_s
        self.list = backups.list
        # Set by the manager before anything is saved.
        self.hold_of: Callable[[ChatId], ChatSandbox]

    @property
    def unsaved(self) -> int:
        """How many chats have files that are not saved yet."""
        return sum(one.changed_s is not None for one in self._chats.values())

    def status(self, chat: ChatId, record: ChatRecord | None) -> tuple[datetime | None, bool]:
        """Return when the chat's files were saved last, and whether they have changed since."""
        kept, one = read_object(record, BACKUP), self._chats.get(chat)
        at = datetime.fromtimestamp(kept["saved"], UTC) if "saved" in kept else None
        if one:
            return one.saved_at or at, one.changed_s is not None
        return at, not kept.get("clean")

    def note_call(self, chat: ChatId) -> None:
        """Note that a call begins or ends that may change files."""
        one = self._chats[chat]
        one.called_s, one.calls = self._now_s(), one.calls + 1
        one.changed_s = one.called_s if one.changed_s is None else one.changed_s

    async def run(self) -> None:
        """Save what is due, until cancelled; failures are tried again with growing pauses."""
        settings, looked_s = self._settings, -math.inf
        pause_s = min(_LOOK_S, settings.after / 4, settings.every / 4)

        async def save(chat: ChatId) -> None:
            async with self.before_end(chat):
                pass

        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    if self._now_s() - looked_s >= settings.every:
                        looked_s = self._now_s()
                        await self._find_left()
                    await self.forget_saved()
                except SandboxError:
                    logger.exception("the records of chats cannot be used; trying again")
                for chat in [chat for chat, one in self._chats.items() if self._is_due(chat, one)]:
                    tasks.start_soon(save, chat)
                await anyio.sleep(pause_s)

    async def _find_left(self) -> None:
        """Note the chats that another process has left unsaved."""
        chats = await self._context.workspaces.chats()
        records = {record.chat: record for record in await self._context.records.list()}
        unknown = {*chats} - self._chats.keys()
        for chat in unknown - await self._context.used_elsewhere(unknown):
            kept = read_object(records.get(chat), BACKUP)
            if not kept.get("clean") and kept.get("newest", 0) > kept.get("epoch", 0):
                await self.let_go(chat)
            elif not kept.get("clean"):
                self._chats[chat] = ChatState(changed_s=self._now_s() - self._settings.every)

    def _is_due(self, chat: ChatId, one: ChatState) -> bool:
        now_s = self._now_s()
        is_waiting = one.breaker.is_open or self._backups.breaker.is_open
        if one.changed_s is None or one.lock.locked() or is_waiting:
            return False
        use = self.hold_of(chat).use()
        rests = not use.calls and now_s - one.called_s >= self._settings.after
        is_due = rests or now_s - one.changed_s >= self._settings.every
        return is_due and (use.open or self._context.capacity.free > 0)

    @asynccontextmanager
    async def before_end(self, chat: ChatId) -> AsyncGenerator[None]:
        """Save the chat if it has changed, and save nothing in the block; a failure is logged."""
        one = self._chats[chat]
        async with one.lock:
            if one.changed_s is not None:
                try:
                    # A store that hangs is found out before a large upload is.
                    one.found = await self.list(chat, soon=True)
                    await self._save(chat, one, changed=True)
                except errors.ChatElsewhere:
                    await self.let_go(chat)
                except SandboxError as exc:
                    # What is wrong with the chat itself, such as its size, lasts longer.
                    is_store = isinstance(exc, StorageUnavailable)
                    one.breaker.note_failure(str(exc), None if is_store else self._settings.every)
                    if isinstance(exc, errors.TooLarge) and one.breaker.failures == 1:
                        self._context.notices.add(chat, f"Your files are not backed up: {exc}.")
                    logger.warning("chat %s is not saved yet; trying again: %s", chat, exc)
            yield
            if not self.hold_of(chat).use().open:
                # What ran during the save may have written since; from now on nothing does.
                one.called_s = -math.inf

    async def let_go(self, chat: ChatId) -> None:
        """Forget a chat that another server has: its files here stay, and are older or shared."""
        logger.warning("chat %s is on another server: this one does not save its files", chat)
        self._chats.pop(chat, None)
        if self._context.leases and self._context.leases.shares_files:
            return
        records, now_s = self._context.records.here, self._context.use_times.clock().wall_s
        await records.keep(chat, BACKUP, lambda kept: {**(kept or {}), "clean": True}, now_s)

    async def save(self, chat: ChatId) -> Backup | None:
        """Save the chat's files now; None if it has none on this machine."""
        one = self._chats[chat]
        async with one.lock:
            one.found = await self.list(chat)
            return await self._save(chat, one)

    async def _save(self, chat: ChatId, one: ChatState, *, changed: bool = False) -> Backup | None:
        """Save it; only if it has `changed` still, once its sandbox is open, where that is set."""
        hold = self.hold_of(chat)
        was, used_s = hold.use(), self._context.use_times.used_s(chat)
        if not (was.open or await self._context.workspaces.exist(chat)):
            one.changed_s = None
            return None
        try:
            async with self._places, hold.open_for_save(as_it_is=True) as held:
                if changed and one.changed_s is None:
                    return None
                copies = bool(self._context.projects.copies and held.project.mounts)
                saved = await self._store(chat, one, held.runtime, copies=copies)
        except NothingRuns:
            # What was not saved has gone with its sandbox.
            one.changed_s = None
            return None
        finally:
            is_unused = self._context.use_times.used_s(chat) == used_s
            with suppress(SandboxError):
                if was.paused and is_unused:
                    await hold.pause()
                elif not was.open and is_unused:
                    await hold.release_if_idle()
        await self._note(chat, one)
        with suppress(StorageUnavailable):
            await self._prune(chat, self._lines.list_old(one, keep=self._settings.keep))
        return saved

    async def _store(
        self,
        chat: ChatId,
        one: ChatState,
        runtime: Runtime,
        *,
        copies: bool = False,
        locked: bool = False,
    ) -> Backup:
        """Save what a sandbox shows; the chat's record notes that before and after.

        `locked`: the caller has the chat's lock, and the sandbox is for this alone.
        """
        new = await self._lines.begin(chat, one, locked=locked)
        await self._mark(chat, one, runtime)
        # Both at once: a call that has ended by now is no reason to save again, and will not ask.
        calls, busy = one.calls, not locked and self.hold_of(chat).use().calls
        began_s, status = self._now_s(), await runtime.status()
        leave_out = self._settings.leave_out
        pack = partial(runtime.files.pack, roots=ROOTS[: 2 + copies], leave_out=leave_out)

        def is_quiet() -> bool:
            return not (busy or status.calls or status.background.total) and calls == one.calls

        saved = await self._backups.save(chat, new, pack, quiet=is_quiet)
        noted = partial(descent.note_saved, saved=saved)
        await self._lines.change(chat, one, noted, locked=locked)
        one.found = [saved, *one.found]
        one.breaker.note_answer()
        one.saved_at = saved.saved_at
        one.changed_s = None if saved.quiet else began_s
        if calls == one.calls:
            # It is not due again before its next call, or as one that is used.
            one.called_s = math.inf
        return saved

    async def _mark(self, chat: ChatId, one: ChatState, runtime: Runtime) -> None:
        """Note with files that are in a sandbox alone which saves they hold."""

    async def _note(self, chat: ChatId, one: ChatState) -> None:
        """Note in the chat's record what was saved, and whether that is all it has."""

        def change(before: BackupState) -> BackupState:
            is_clean = one.changed_s is None and not self.hold_of(chat).use().open
            return one.describe(before, clean=is_clean)

        await self._lines.change(chat, one, change)

    async def forget_saved(self) -> None:
        """Note in their records which chats are saved and closed, and forget them."""
        for chat, one in list(self._chats.items()):
            hold = self.hold_of(chat)
            used = hold.is_busy or hold.use().open or one.lock.locked()
            if one.changed_s is None and not used:
                async with one.lock:
                    if await self._context.workspaces.exist(chat):
                        await self._note(chat, one)
                    if one.changed_s is None and not hold.use().open:
                        self._chats.pop(chat, None)

    async def prepare(self, chat: ChatId, record: ChatRecord | None, *, runs: bool = False) -> bool:
        """Bring the chat's newest files here before its sandbox opens.

        The caller has the chat's lock, and stores what `describe` returns. False if its sandbox
        `runs` here already, on files that are older than the newest backup.

        Raises:
            BackendUnavailable: its files are in the store alone, which does not answer, or are
                larger than they may be now.
        """
        here = await self._context.workspaces.exist(chat)
        if chat not in self._chats:
            now_s, is_left = self._now_s(), here and not read_object(record, BACKUP).get("clean")
            self._chats[chat] = ChatState(changed_s=now_s if is_left else None, called_s=now_s)
        unpack = partial(self._unpack, chat, record)
        keep = partial(self._keep_line, chat, record)
        return await self._bring(chat, record, unpack, keep, here=here, runs=runs) is not None

    async def _bring(
        self,
        chat: ChatId,
        record: ChatRecord | None,
        unpack: Callable[[Backup], Awaitable[None]],
        keep: Callable[[], Awaitable[bool]] | None = None,
        *,
        here: bool,
        runs: bool = False,
    ) -> Sequence[Backup] | None:
        """Have the files unpacked that the chat goes on from, unless it has, and set its epoch.

        Those `here` are left once `keep` has saved them. Return the backups that there are; None,
        and do nothing, if a sandbox `runs` on files that are to be left.
        """
        one, notices = self._chats[chat], self._context.notices
        kept = one.kept = read_object(record, BACKUP)
        epoch, latest = (int(kept.get(name, 0)) for name in ("epoch", "newest"))
        lease, one.found = self._context.check_lease(chat), ()
        one.epoch = lease or epoch or 1
        try:
            one.found = await self.list(chat, soon=True)
            own = self._lines.read(one)
            take = descent.choose(own, one.found, here=here, leased=bool(lease))
            if first := one.wanted or one.due:
                take = [*first, *(each for each in take if not here and each not in first)]
            one.is_behind, one.line = bool(take), own.line
            if one.is_behind and runs:
                return None
            if take and keep and here and not (one.wanted or kept.get("clean")):
                take = take if await keep() else ()
            newest = max([epoch, latest, *(each.epoch for each in one.found)])
            if lease or take or not epoch:
                now_ms = int(1000 * self._context.use_times.clock().wall_s)
                one.epoch = max(lease or now_ms, newest + 1)
            backup = await _restore_first(self._context, chat, take, unpack, here) if take else None
            is_called = self.hold_of(chat).use().calls > 0
            self._lines.go_on(chat, one, backup, here=here, is_called=is_called)
        except StorageUnavailable as exc:
            if one.is_behind or latest > epoch or (epoch and not here):
                raise errors.BackendUnavailable(
                    f"the newest files of chat {chat} are in a backup, and the object store does "
                    f"not answer ({exc}): call again when it does"
                ) from exc
            mine = "these are the files of this machine" if here else "it begins without files"
            notices.add(chat, f"Whether there are newer files could not be asked; {mine}.")
        if latest > max([epoch, *(each.epoch for each in one.found)]):
            notices.add(chat, _NEVER_SAVED)
        return one.found

    async def _keep_line(self, chat: ChatId, record: ChatRecord | None) -> bool:
        """Save what is here before it gives way; False, and told, if that cannot be done."""
        context, one = self._context, self._chats[chat]
        try:
            shown = await context.projects.show(chat, read_object(record, PROJECT))
            mounts = shown.mounts if context.projects.copies else ()
            directories = await context.workspaces.open(chat)
            epoch, breaker = one.kept.get("epoch") or 1, CircuitBreaker(most_s=_MOST_PAUSE_S)
            before = replace(one, epoch=epoch, breaker=breaker)
            async with _apart(context, chat, record, directories, mounts) as runtime:
                await self._store(chat, before, runtime, copies=bool(mounts), locked=True)
            one.kept, one.found = before.kept, before.found
            one.line = self._lines.read(one).line
        except SandboxError as exc:
            logger.warning("chat %s: its files stay as they are: %s", chat, exc)
            context.notices.add(chat, f"Newer files wait in a backup: {exc}.")
            return False
        return True

    def describe(self, chat: ChatId, record: ChatRecord | None) -> Mapping[str, Any]:
        """Return what is `further` stored of a chat whose sandbox is open."""
        one = self._chats[chat]
        kept = {name: value for name, value in one.kept.items() if name != "newest"}
        news = one.describe(kept, clean=False)
        return {**(record.further if record else {}), BACKUP: news}

    async def find(self, chat: ChatId, key: str | None = None) -> Sequence[Backup]:
        """Return the chat's backups of that key, or all, the newest first. Raises NotFound."""
        if found := [each for each in await self.list(chat) if key in (None, each.key)]:
            if key is None:
                kept = read_object(await self._context.records.here.look(chat), BACKUP)
                own = descent.read_own(kept, self._lines.server, found)
                found.sort(key=lambda each: each.key not in own.line)
            return found
        which, seen = f" {key}" if key else "", f"`mcp-sandbox backup list {chat}`"
        raise errors.NotFound(f"chat {chat} has no backup{which}: see `mcp-sandbox ls` and {seen}")

    async def restore(self, chat: ChatId, key: str | None = None) -> Backup:
        """Open a new sandbox on the files of a backup, by default of the newest that is sound.

        The files that the chat has are saved if they have changed, and go to the trash.

        Raises:
            NotFound: there is no such backup.
            BackupDamaged: none can be restored; the files stay.
        """
        found = await self.find(chat, key)
        async with self.before_end(chat):
            one, hold = self._chats[chat], self.hold_of(chat)
            await hold.end()
            one.wanted, one.saved_at = found, None
            try:
                async with hold.open_for_save():
                    done = [each for each in found if each.saved_at == one.saved_at]
            finally:
                one.wanted, one.is_behind = (), False
            if not done:
                raise errors.BackupDamaged(f"no backup of chat {chat} can be restored: see the log")
            # So that it becomes the newest for other servers too.
            self.note_call(chat)
        return done[0]

    async def _unpack(self, chat: ChatId, record: ChatRecord | None, backup: Backup) -> None:
        """Unpack a backup beside the chat's files, in a sandbox for this alone; then use it."""
        context, one = self._context, self._chats[chat]
        copies = context.projects.copies
        limit = (await context.workspaces.open_disk_usage(chat).usage()).limit_bytes
        staged = await context.workspaces.stage(chat)
        project = (Mount(staged.workspace.with_name("project"), TARGET),) if copies else ()
        async with _apart(context, chat, record, staged, project) as runtime:
            await self._unpack_in(runtime, backup, ROOTS[: 2 + copies], limit)
        # Whether it is killed before or after the next step, this holds.
        parted = descent.part(backup.line, one.line)
        noted = {"saves": [parted] if parted else [], "begun": [], "clean": True}
        if not await context.workspaces.exist(chat):
            noted |= {"saves": [backup.key], "epoch": backup.epoch}
        await self._lines.change(chat, one, lambda kept: {**kept, **noted}, locked=True)
        await context.workspaces.replace(chat)

    async def _unpack_in(
        self, runtime: Runtime, backup: Backup, roots: Sequence[str], max_bytes: int
    ) -> None:
        """Unpack a backup in a sandbox whose `roots` are empty."""
        most = self._context.settings.workspace.max_files
        async with aclosing(self._backups.read(backup)) as data:
            await runtime.files.unpack(data, roots=roots, max_bytes=max_bytes, max_entries=most)

    async def share(self, chat: ChatId, path: str, files: Files, expires_s: float) -> str:
        """Copy a file of the chat to the store; return an address that downloads it."""
        read = partial(files.read_to, path)
        return await self._backups.share(chat, PurePosixPath(path).name, read, expires_s)

    async def remove(self, chat: ChatId, *, line: ChatRecord | None = None) -> None:
        """Remove the chat's backups, after a save under way; of a record, its own line alone."""
        async with (one := self._chats[chat]).lock:
            if line:
                one.kept, one.found = read_object(line, BACKUP), await self.list(chat)
                await self._prune(chat, self._lines.list_old(one, keep=0))
            else:
                await self._backups.remove(chat)
            self._chats.pop(chat, None)


class _Lines:
    """What the records of chats have of lines of saves; `server` is the name of this data root."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.server = name_server(context.workspaces.data_root)

    def read(self, one: ChatState) -> descent.Own:
        return descent.read_own(one.kept, self.server, one.found)

    async def begin(self, chat: ChatId, one: ChatState, *, locked: bool) -> NewSave:
        """Note a save before its upload, and tell of other lines."""
        now_s, new = self._context.use_times.clock().wall_s, list[NewSave]()

        def begin(kept: BackupState) -> BackupState:
            one.kept, at = kept, datetime.fromtimestamp(now_s, UTC)
            new.append(NewSave(one.epoch, at, self.read(one).ancestors, self.server))
            one.kept = kept if locked else self.tell(chat, one)
            return descent.note_begun(one.kept, new[0].key, self.server)

        await self.change(chat, one, begin, locked=locked)
        return new[0]

    async def change(
        self, chat: ChatId, one: ChatState, change: Change, *, locked: bool = False
    ) -> None:
        """Change what the chat's record has of backups; `locked`: the caller has its lock."""
        records, now_s = self._context.records.here, self._context.use_times.clock().wall_s
        async with nullcontext() if locked else records.hold(chat):
            record = await records.get(chat)
            record = record or ChatRecord(chat, self._context.backend.name, now_s, now_s)
            one.kept = change(read_object(record, BACKUP))
            await records.put(replace(record, further={**record.further, BACKUP: one.kept}))

    def list_old(self, one: ChatState, *, keep: int) -> ListOld:
        """Return what picks the backups to remove; with `keep` 0 all that are this server's alone.

        Of a copied root those from before belong to the other one, too.
        """
        line, names = self.read(one).line, {"", self.server}
        if not keep:
            line = line & {each.key for each in one.found if each.server in names}
        return partial(descent.list_old, line, one.found, keep=keep)

    def go_on(
        self, chat: ChatId, one: ChatState, backup: Backup | None, *, here: bool, is_called: bool
    ) -> None:
        """Note from what the chat goes on, and tell what that leaves."""
        own, chosen = self.read(one), bool(one.wanted)
        own = own._replace(line=own.line | one.line)
        kept = descent.note_taken(one.kept, own, one.found, backup, here=here, chosen=chosen)
        one.kept = {**kept, "by": self.server}
        one.kept = self.tell(chat, one)
        if backup:
            # What no call has changed since is saved already.
            one.saved_at, one.changed_s = backup.saved_at, one.changed_s if is_called else None
        one.due, one.is_behind = (), False

    def tell(self, chat: ChatId, one: ChatState) -> BackupState:
        """Tell once of each other line, and of a store without the own; return the new record."""
        own, told = self.read(one), [*one.kept.get("told", ())]
        news = {
            f"{save.server} {parted}": f"There are other files of this chat, which the server "
            f"{save.server or '(unknown)'} saved last at {_moment(save)}: these here go on without "
            f"them. Tell the user: `mcp-sandbox backup list {chat}` shows all backups, and "
            f"`mcp-sandbox backup restore {chat} {save.key}` goes on with those."
            for save, parted in descent.list_others(own, one.found)
            if not self._context.leases or save.epoch >= own.epoch
        }
        if own.line and not any(own.line & each.line for each in one.found):
            news["missing"] = (
                "The last backup of this chat is not in the object store: is it the right one? "
                "What is in /workspace goes on, and is saved anew."
            )
        for what in [each for each in news if each not in told]:
            told.append(what)
            self._context.notices.add(chat, news[what])
            logger.warning("chat %s: %s", chat, news[what])
        return {**one.kept, "told": told[-_MOST_TOLD:]} if told else one.kept


@asynccontextmanager
async def _apart(
    context: SessionContext,
    chat: ChatId,
    record: ChatRecord | None,
    directories: ChatDirectories,
    mounts: tuple[Mount, ...],
) -> AsyncGenerator[Runtime]:
    """Yield the runtime of a sandbox that shows a chat's files for this alone."""
    assistant, labels = read_assistant_spec(record), {"user": chat.user, "chat": chat.chat}
    origin = await context.backend.origin(assistant.image)
    spec = context.settings.spec(directories, labels, origin, mounts, assistant)
    sandbox = await context.backend.create(spec)
    try:
        connected = await connect(sandbox, directories, context.tasks, context.settings)
        async with aclosing(connected) as runtime:
            yield runtime
    finally:
        with anyio.move_on_after(_DESTROY_S, shield=True):
            await context.backend.destroy(sandbox.id)


async def _restore_first(
    context: SessionContext,
    chat: ChatId,
    found: Sequence[Backup],
    unpack: Callable[[Backup], Awaitable[None]],
    here: bool,
) -> Backup | None:
    """Put the first backup that can be restored in place of files that may be `here`."""
    tell = partial(context.notices.add, chat)
    is_too_large = False
    for backup in found:
        try:
            await unpack(backup)
        except (errors.BackupDamaged, errors.CallerError, errors.SandboxGone) as exc:
            is_too_large |= isinstance(exc, errors.TooLarge)
            logger.warning("chat %s: backup %s is passed over: %s", chat, backup.key, exc)
            tell(f"The backup of {_moment(backup)} could not be restored: {exc}")
            continue
        quiet = "" if backup.quiet else " It was made while something ran: look at them first."
        tell(
            f"Your files are as of {_moment(backup)}, from a backup: what was written or "
            f"installed after that is not there, and nothing that ran runs on.{quiet}"
        )
        logger.info("chat %s: restored %s", chat, backup.key)
        return backup
    if is_too_large and not here:
        # Else it would begin with nothing, and its backups would make way for that.
        raise errors.BackendUnavailable(
            f"the files of chat {chat} are in a backup only, and larger than "
            "workspace.size_limit, max_files or user_quota allow: allow more, or remove other "
            "chats of the user"
        )
    tell("No backup could be restored: what is in /workspace is all that is left.")
    return None


def _moment(backup: Backup) -> str:
    at = backup.saved_at.astimezone(UTC)
    return f"{at:%H:%M:%S} UTC" if at.date() == datetime.now(UTC).date() else f"{at:%F %T} UTC"
