"""Chats whose sandboxes hold their files themselves: on this host are only their skills.

A new sandbox is filled with the newest backup. It is saved before it ends; where that fails it does
not end, but is paused, until a later try succeeds. Its files carry a mark, "USER/CHAT EPOCH": those
of another chat are not touched; those of a lower epoch than the chat has are saved as such first.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import anyio

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.config import StorageConfig, WorkspaceConfig
from mcp_sandbox.errors import (
    BackendUnavailable,
    SandboxError,
    SandboxGone,
    StorageUnavailable,
    Unsaved,
)
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.files import ROOTS
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_records import BACKUP, ChatRecord, ChatRecords, read_backup
from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext
from mcp_sandbox.sessions.sandbox.warm_pool import connect
from mcp_sandbox.sessions.saving import (
    NEVER_SAVED,
    Kept,
    Saving,
    describe_unasked,
    next_epoch,
)
from mcp_sandbox.storage.backups import Backup, Backups
from mcp_sandbox.workspace import layout
from mcp_sandbox.workspace.directory import ChatDirectories, Workspaces
from mcp_sandbox.workspace.meter import Checkpoint, DiskUsage, FreeSpace, TreeUsage

_HELD = ChatDirectories(Path(), Path(), 0, held=True)
# A look at the files is a call over the network.
_MEASURE_S = 5.0
_AT_ONCE = 1000
_JUST_NOW_S = 30.0


class HeldWorkspaces(Workspaces):
    """The chats of one data root whose sandboxes hold their files; their records list them."""

    def __init__(
        self,
        data_root: Path,
        records: ChatRecords,
        *,
        owner: tuple[int, int],
        settings: WorkspaceConfig,
        skills: bool = False,
    ) -> None:
        super().__init__(data_root, owner=owner, settings=settings, skills=skills)
        self._records = records
        self.open_ones: WeakValueDictionary[ChatId, OpenSandbox] = WeakValueDictionary()
        # What each chat had when it was looked at last.
        self.seen: dict[ChatId, int] = {}

    def _open(self, chat: ChatId) -> ChatDirectories:
        if self._skills:
            with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
                tree, _ = self._tree(stack, sandbox, "skills", chat)
                layout.enter_shown(stack, tree, layout.SHOWN)
        return _HELD

    async def exist(self, chat: ChatId) -> bool:
        record = await self._records.look(chat)
        return record is not None and record.backend is not None

    async def chats(self) -> Sequence[ChatId]:
        return [record.chat for record in await self._records.list() if record.backend]

    def open_disk_usage(self, chat: ChatId) -> DiskUsage:
        return _HeldUsage(chat, self, self._settings)


class _HeldUsage(DiskUsage):
    """What a chat has, as the runner of its open sandbox tells."""

    def __init__(self, chat: ChatId, workspaces: HeldWorkspaces, settings: WorkspaceConfig) -> None:
        nothing, limiter = (TreeUsage(0, 0), FreeSpace(0, None)), anyio.CapacityLimiter(1)
        super().__init__(lambda _: nothing, settings, limiter=limiter, least_interval_s=_MEASURE_S)
        self._chat, self._workspaces = chat, workspaces

    async def _look(self, checkpoint: Checkpoint) -> tuple[TreeUsage, FreeSpace]:  # noqa: ARG002
        # What is free there is the sandbox's own disk, of which nothing need be kept free.
        held, seen = self._workspaces.open_ones.get(self._chat), self._workspaces.seen
        space, user = self._config, self._chat.user
        usage, free = TreeUsage(seen.get(self._chat, 0), 0), space.size_limit
        if held and not held.paused:
            with suppress(SandboxError):
                found = await held.runtime.files.measure()
                usage, free = TreeUsage(found.bytes, found.entries, found.complete), found.free
                seen[self._chat] = found.bytes
        others = sum(n for chat, n in seen.items() if chat.user == user and chat != self._chat)
        allowed = space.user_quota - others if space.user_quota else None
        return usage, FreeSpace(space.min_free + free, None, allowed)


class Holding(Saving):
    """The backups of chats whose files have no other copy than in their sandbox."""

    def __init__(self, backups: Backups, settings: StorageConfig, context: SessionContext) -> None:
        super().__init__(backups, settings, context)
        held = context.workspaces
        assert isinstance(held, HeldWorkspaces)  # noqa: S101 - as the backend holds files
        self.open_ones, self._seen = held.open_ones, held.seen

    async def prepare(
        self,
        chat: ChatId,
        record: ChatRecord | None,
        *,
        runs: bool = False,  # noqa: ARG002 - what runs is asked itself
    ) -> Kept | None:
        """Return what the chat's record is to say; its files come by `fill`."""
        kept, one = read_backup(record), self._chats[chat]
        lived = record is not None and record.backend is not None
        if lived and one.changed_s is None and not (chat in self.open_ones or kept.get("clean")):
            # Another server has left it so, or this one before it was noted: that is saved again.
            one.changed_s = one.called_s = self._now_s()
        own = int(kept.get("epoch", 0))
        one.epoch = max(one.epoch, own, self._context.check_lease(chat))
        saved = {"saved": one.saved_at.timestamp()} if one.saved_at else {}
        news = {**kept, **saved, "epoch": one.epoch, "clean": False}
        news.pop("newest", None)
        return {**(record.further if record else {}), BACKUP: news}

    async def fill(self, chat: ChatId, runtime: Runtime) -> None:
        """Bring the chat's newest files into a new sandbox, and mark them.

        Raises:
            BackendUnavailable: they are in the store alone, which does not answer.
        """
        record, one = await self._context.records.get(chat), self._chats[chat]
        kept, limit = read_backup(record), self._context.settings.workspace.size_limit
        own, latest = (int(kept.get(name, 0)) for name in ("epoch", "newest"))

        async def unpack(backup: Backup) -> None:
            await self._unpack_in(runtime, backup, ROOTS[:2], limit)

        await runtime.files.mark(f"{chat} -")
        found = one.wanted
        try:
            found = found or await self.list(chat, soon=True)
            if found and (backup := await self._restore(chat, found, unpack, here=False)):
                one.saved_at = backup.saved_at
        except StorageUnavailable as exc:
            known = found or "epoch" in kept
            self._context.notices.add(chat, describe_unasked(chat, exc, here=False, known=known))
        if not found and record and record.backend:
            self._context.notices.add(
                chat, "The sandbox with your files is gone and there is no backup: they are lost."
            )
        if latest > max((each.epoch for each in found), default=0):
            self._context.notices.add(chat, NEVER_SAVED)
        now = self._context.check_lease(chat) or int(1000 * self._context.use_times.clock().wall_s)
        one.epoch = next_epoch(found, max(own, latest), now)
        await runtime.files.mark(f"{chat} {one.epoch}")

    async def recognise(self, chat: ChatId, sandbox: Sandbox) -> Runtime | None:
        """Connect to a sandbox with the chat's newest files; None if it may be ended.

        Raises:
            BackendUnavailable: it does not answer, or its files are not marked as the chat's.
            Unsaved: its files are older, and cannot be saved.
            SandboxGone: it ended meanwhile.
        """
        runtime = await self.connect(chat, sandbox)
        try:
            if await self._is_newest(chat, runtime):
                return runtime
        except BaseException:
            await runtime.aclose()
            raise
        await runtime.aclose()
        return None

    async def connect(self, chat: ChatId, sandbox: Sandbox) -> Runtime:
        """Connect to a sandbox that may have the only copy of files. Raises BackendUnavailable."""
        try:
            return await connect(sandbox, _HELD, self._context.tasks, self._context.settings)
        except SandboxGone as exc:
            raise _keep_apart(chat, f"does not answer ({exc})") from exc

    def is_saved(self, chat: ChatId) -> bool:
        """Return whether its sandbox may end: all is saved, or was just now while something ran."""
        one = self._chats[chat]
        since_s = 0.0 if one.changed_s is None else self._now_s() - one.changed_s
        return one.changed_s is None or (one.called_s == math.inf and since_s < _JUST_NOW_S)

    async def _is_newest(self, chat: ChatId, runtime: Runtime) -> bool:
        said, one = await runtime.files.mark(), self._chats[chat]
        whose, _, epoch = said.mark.partition(" ")
        if said.mark == f"{chat} -" or (said.empty and not said.mark):
            # Nothing of the chat has run in it: it was being filled.
            return False
        if whose != str(chat) or not epoch.isdecimal():
            raise _keep_apart(chat, "holds files that are not marked as the chat's")
        kept = read_backup(await self._context.records.get(chat))
        newest = max(int(kept.get(name, 0)) for name in ("epoch", "newest"))
        with suppress(StorageUnavailable):
            newest = max(newest, *(each.epoch for each in await self.list(chat, soon=True)), 0)
        if int(epoch) < newest:
            await self.keep(chat, runtime, older=int(epoch))
            return False
        one.epoch = max(int(epoch), self._context.check_lease(chat))
        if one.epoch > int(epoch):
            await runtime.files.mark(f"{chat} {one.epoch}")
        return True

    async def keep(self, chat: ChatId, runtime: Runtime, older: int | None = None) -> None:
        """Save the chat's files, under an `older` epoch if one is given. Raises Unsaved."""
        one = self._chats[chat]
        try:
            # A store that hangs is found out before a large upload is.
            await self.list(chat, soon=True)
            await self._store(chat, one if older is None else replace(one, epoch=older), runtime)
        except SandboxError as exc:
            raise Unsaved(
                f"the files of chat {chat} could not be saved, so its sandbox is not ended; it is "
                f"paused where that can be done, and saved later: {exc}"
            ) from exc

    async def empty(self, runtime: Runtime) -> None:
        """Delete what is in the workspace of a sandbox."""
        while entries := (await runtime.files.list(limit=_AT_ONCE)).entries:
            for entry in entries:
                await runtime.files.delete(entry.path, recursive=True)

    async def remove(self, chat: ChatId) -> None:
        self._seen.pop(chat, None)
        await super().remove(chat)


def _keep_apart(chat: ChatId, why: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the sandbox of chat {chat} {why}, and is kept for the files in it: call again, or end it "
        "by force (`mcp-sandbox stop --force`) to go on from the newest backup"
    )
