"""Files that are in the sandboxes of their chats alone: on this host are only their skills.

A new sandbox is filled with the newest backup. It is saved before it ends; where that fails it does
not end, but is paused, until a later try succeeds. Its files carry a mark, "USER/CHAT EPOCH SAVES":
those of another chat are not touched; those that others give way to are saved first, as their own
line. SAVES are the keys of what they hold, after a "?" those begun; earlier versions note none.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import anyio

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.config import StorageConfig, WorkspaceConfig
from mcp_sandbox.config.values import GIB
from mcp_sandbox.errors import (
    SandboxError,
    SandboxGone,
    StorageUnavailable,
    Unreachable,
    Unsaved,
)
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.files import ROOTS
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_records import BACKUP, ChatRecord, ChatRecords, read_object
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext
from mcp_sandbox.sessions.sandbox.files import PAUSE_S
from mcp_sandbox.sessions.sandbox.warm_pool import connect
from mcp_sandbox.sessions.saving import BackupState, ChatState, Saving
from mcp_sandbox.storage import descent
from mcp_sandbox.storage.backups import Backup, Backups
from mcp_sandbox.workspace import layout
from mcp_sandbox.workspace.directory import ChatDirectories, Workspaces
from mcp_sandbox.workspace.meter import Checkpoint, DiskUsage, FreeSpace, TreeUsage
from mcp_sandbox.workspace.users import SandboxUsers

_NOWHERE = ChatDirectories(Path(), Path(), 0, mounted=False)
# A look at the files is a call over the network; they may grow by so much in a second.
_MEASURE_S, _SOON_S, _FASTEST = 5.0, 0.5, GIB
_AT_ONCE = 1000
_JUST_NOW_S = 30.0


class RecordedWorkspaces(Workspaces):
    """The chats of one data root that have no folders here but for skills; records list them."""

    def __init__(
        self,
        data_root: Path,
        records: ChatRecords,
        *,
        users: SandboxUsers,
        settings: WorkspaceConfig,
        skills: bool = False,
    ) -> None:
        super().__init__(data_root, users=users, settings=settings, skills=skills)
        self._records = records
        # The last connection to each chat's sandbox, and how large its files were last.
        self.runtimes: WeakValueDictionary[ChatId, Runtime] = WeakValueDictionary()
        self.sizes: dict[ChatId, int] = {}
        self.note_full: Callable[[ChatId], None]

    def _open(self, chat: ChatId) -> ChatDirectories:
        if self._skills:
            with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
                tree, _ = self._tree(stack, sandbox, "skills", chat)
                layout.enter_shown(stack, tree, layout.SHOWN)
        return _NOWHERE

    async def exist(self, chat: ChatId) -> bool:
        record = await self._records.look(chat)
        return record is not None and record.backend is not None

    async def chats(self) -> Sequence[ChatId]:
        return [record.chat for record in await self._records.list() if record.backend]

    def open_disk_usage(self, chat: ChatId) -> DiskUsage:
        return _RuntimeUsage(chat, self, self._settings)


class _RuntimeUsage(DiskUsage):
    """What a chat has, as the runner of its open sandbox tells."""

    def __init__(
        self, chat: ChatId, workspaces: RecordedWorkspaces, settings: WorkspaceConfig
    ) -> None:
        nothing, limiter = (TreeUsage(0, 0), FreeSpace(0, None)), anyio.CapacityLimiter(1)
        super().__init__(lambda _: nothing, settings, limiter=limiter, least_interval_s=_MEASURE_S)
        self._chat, self._workspaces = chat, workspaces

    async def _look(self, checkpoint: Checkpoint) -> tuple[TreeUsage, FreeSpace]:  # noqa: ARG002
        # What is free there is the sandbox's own disk, of which nothing need be kept free.
        runtime, sizes = self._workspaces.runtimes.get(self._chat), self._workspaces.sizes
        space, user = self._config, self._chat.user
        usage, free = TreeUsage(sizes.get(self._chat, 0), 0), space.size_limit
        with suppress(SandboxError):
            if runtime:
                found = await runtime.files.measure()
                usage, free = TreeUsage(found.bytes, found.entries, found.complete), found.free
                if sizes.get(self._chat, 0) <= space.size_limit < found.bytes:
                    self._workspaces.note_full(self._chat)
                sizes[self._chat] = found.bytes
                full_s = (space.size_limit - found.bytes) / _FASTEST
                self._least_interval_s = min(_MEASURE_S, max(_SOON_S, full_s))
        others = sum(n for chat, n in sizes.items() if chat.user == user and chat != self._chat)
        allowed = space.user_quota - others if space.user_quota else None
        return usage, FreeSpace(space.min_free + free, None, allowed)


class SandboxFiles(Saving):
    """Files that have no other copy than their backups."""

    lost_with_sandbox = True

    def __init__(self, backups: Backups, settings: StorageConfig, context: SessionContext) -> None:
        super().__init__(backups, settings, context)
        assert isinstance(context.workspaces, RecordedWorkspaces)  # noqa: S101 - as it holds files
        self._workspaces = context.workspaces
        self._workspaces.note_full = self._save_soon
        # The secret of each chat's sandbox that has had the mark.
        self._marked: dict[ChatId, bytes] = {}

    async def prepare(
        self,
        chat: ChatId,
        record: ChatRecord | None,
        *,
        runs: bool = False,  # noqa: ARG002 - what runs is asked itself
    ) -> bool:
        one = self._chats[chat]
        kept = one.kept = read_object(record, BACKUP)
        if one.changed_s is None and not kept.get("clean"):
            # A server has left it so, or the record was lost: what there is, is saved again.
            one.changed_s = one.called_s = self._now_s()
        one.epoch = max(one.epoch, int(kept.get("epoch", 0)), self._context.check_lease(chat))
        return True

    async def connect_new(
        self, chat: ChatId, sandbox: Sandbox, directories: ChatDirectories
    ) -> Runtime:
        runtime = await connect(sandbox, directories, self._context.tasks, self._context.settings)
        # A volume may be left of an older one.
        is_used = self._context.backend.keeps_paused_files and (await runtime.files.mark()).mark
        if not (is_used and await self._has_newest(chat, sandbox, runtime)):
            await self._fill(chat, runtime)
        self._workspaces.runtimes[chat], self._marked[chat] = runtime, sandbox.token
        return runtime

    async def connect(
        self, chat: ChatId, sandbox: Sandbox, directories: ChatDirectories
    ) -> Runtime | None:
        context, runtime, has_newest = self._context, None, False
        try:
            runtime = await connect(sandbox, directories, context.tasks, context.settings)
            has_newest = await self._has_newest(chat, sandbox, runtime)
        except SandboxGone as exc:
            raise _leave_alone(chat, f"does not answer ({exc})") from exc
        finally:
            if runtime and not has_newest:
                await runtime.aclose()
        if has_newest:
            self._workspaces.runtimes[chat] = runtime
        return runtime if has_newest else None

    async def _fill(self, chat: ChatId, runtime: Runtime) -> None:
        """Bring the chat's newest files into a new sandbox, and mark them."""
        record = await self._context.records.get(chat)
        # As much as one that was stopped at the limit may have.
        limit = 2 * self._context.settings.workspace.size_limit

        async def unpack(backup: Backup) -> None:
            await runtime.files.mark(f"{chat} -")
            await self._unpack_in(runtime, backup, ROOTS[:2], limit)

        if not await self._bring(chat, record, unpack, here=False) and record and record.backend:
            self._context.notices.add(
                chat, "The sandbox with your files is gone and there is no backup: they are lost."
            )
        await self._mark(chat, self._chats[chat], runtime)
        # What was only restored need not be saved again.
        self._chats[chat].changed_s = None

    async def _mark(self, chat: ChatId, one: ChatState, runtime: Runtime) -> None:
        begun = (f"?{key}" for key in self._lines.read(one).begun)
        saves = one.kept.get("saves", ())
        await runtime.files.mark(" ".join([f"{chat} {one.epoch}", *saves, *begun]))

    async def _has_newest(self, chat: ChatId, sandbox: Sandbox, runtime: Runtime) -> bool:
        """Return whether a sandbox has the chat's newest files; older ones are saved as such."""
        noted, one = await runtime.files.mark(), self._chats[chat]
        record = await self._context.records.get(chat)
        kept, mark = read_object(record, BACKUP), noted.mark
        is_known = not mark and record and record.sandbox_id == sandbox.id
        if is_known and (not noted.empty or self._marked.get(chat) == sandbox.token):
            # What ran inside has deleted it; else one of the same name may have lost its files.
            mark = f"{chat} {kept.get('epoch', 0)}"
        whose, _, rest = mark.partition(" ")
        epoch, *keys = rest.split(" ")
        if mark == f"{chat} -" or (noted.empty and not mark):
            # Nothing of the chat has run in it: it was being filled.
            return False
        if whose != str(chat) or not epoch.isdecimal():
            raise _leave_alone(chat, "holds files that are not marked as the chat's")
        if await self._gives_way(chat, kept, int(epoch), keys):
            await self.save_before_end(chat, runtime, older=int(epoch))
            return False
        one.epoch = max(int(epoch), self._context.check_lease(chat))
        if one.epoch > int(epoch) or not noted.mark:
            await self._mark(chat, one, runtime)
        self._marked[chat] = sandbox.token
        return True

    async def _gives_way(
        self, chat: ChatId, kept: BackupState, epoch: int, keys: Sequence[str]
    ) -> bool:
        """Return whether files with this mark are to be left for others; note what they hold."""
        one, server = self._chats[chat], self._lines.server
        begun = [key[1:] for key in keys if key.startswith("?")]
        held = {"saves": [key for key in keys if key[0] != "?"], "begun": begun, "by": server}
        # An earlier version marks no saves: the record knows, if it is of this epoch.
        one.kept = {**kept, **({} if not keys and epoch == kept.get("epoch") else held)}
        leased, one.found = bool(self._context.check_lease(chat)), ()
        with suppress(StorageUnavailable):
            one.found = await self.list(chat, soon=True)
        own = self._lines.read(one)._replace(epoch=epoch)
        take = descent.choose(own, one.found, here=True, leased=leased)
        newest = max(
            *(kept.get(name, 0) for name in ("epoch", "newest")),
            *(each.epoch for each in one.found),
        )
        is_older = (leased or not keys) and epoch < newest
        one.due = take or (one.found if is_older else ())
        noted = one.kept if one.due else self._lines.tell(chat, one)
        if noted != kept:
            await self._lines.change(chat, one, lambda _: noted, locked=True)
        return is_older or bool(take)

    def is_saved(self, chat: ChatId) -> bool:
        """Return whether all is saved, or was just now while something ran."""
        one = self._chats[chat]
        since_s = 0.0 if one.changed_s is None else self._now_s() - one.changed_s
        return one.changed_s is None or (one.called_s == math.inf and since_s < _JUST_NOW_S)

    def note_gone(self, chat: ChatId) -> None:
        """Note that what was not saved is gone: the next sandbox begins with what was."""
        if one := self._chats.get(chat):
            one.changed_s = None

    def _save_soon(self, chat: ChatId) -> None:
        """Have it saved at once: its place may end a sandbox that has too much."""
        self._chats[chat].changed_s = -math.inf

    async def save_before_end(
        self, chat: ChatId, runtime: Runtime, *, older: int | None = None
    ) -> None:
        """Save the chat's files, unless they are; under an `older` epoch if one is given."""
        one = self._chats[chat]
        if older is None and self.is_saved(chat):
            return
        try:
            # A store that hangs is found out before a large upload is.
            one.found = await self.list(chat, soon=True)
            saved = one if older is None else replace(one, epoch=older)
            await self._store(chat, saved, runtime, locked=True)
        except SandboxError as exc:
            raise Unsaved(
                f"the files of chat {chat} could not be saved, so its sandbox is not ended; it is "
                f"paused where that can be done, and saved later: {exc}"
            ) from exc

    async def empty(self, sandbox: ChatSandbox) -> None:
        async with sandbox.open_for_save() as held:
            # Not before: what a new sandbox is filled with counts as saved.
            self.note_call(sandbox.chat)
            await held.make_room()
            files = held.runtime.files
            while entries := (await files.list(limit=_AT_ONCE)).entries:
                for entry in entries:
                    await files.delete(entry.path, recursive=True)

    async def leave(self, held: OpenSandbox, *, lost: bool) -> bool:  # noqa: ARG002 - in any case
        """Pause it; it never ends here: its files are saved later, as older ones if they are."""
        with suppress(SandboxError), anyio.move_on_after(PAUSE_S):
            is_shared = False
            with suppress(SandboxGone):
                is_shared = (await held.runtime.status()).connections > 1
            if not is_shared:
                await held.sandbox.pause()
        return True

    async def remove(self, chat: ChatId, *, line: ChatRecord | None = None) -> None:
        self._workspaces.sizes.pop(chat, None)
        self._marked.pop(chat, None)
        await super().remove(chat, line=line)


def _leave_alone(chat: ChatId, why: str) -> Unreachable:
    return Unreachable(
        f"the sandbox of chat {chat} {why}, and is kept for the files in it: call again, or end it "
        "by force (`mcp-sandbox stop --force`) to go on from the newest backup"
    )
