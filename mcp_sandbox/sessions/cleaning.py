"""Removes the files of chats that nobody used for long, through the trash, and empties the trash.

What is due is decided in workspace.retention; this looks, and does it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from anyio import to_thread

from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.clock import recall, remember
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.wards import Wards
from mcp_sandbox.skills.snapshots import KEPT_S, Snapshots
from mcp_sandbox.workspace.directory import TRASH_KEPT_S, Workspaces
from mcp_sandbox.workspace.retention import Age, Ages, Due, Moment, due, in_words, outdated

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GcItem:
    """Something that is, or would be, removed; `what` is a chat, as "user/chat", where known.

    kind: the files of a chat, what was thrown away before, a sandbox that is nobody's, or a copy of
    a skill that no chat has.
    """

    kind: Literal["workspace", "trash", "sandbox", "skill"]
    what: str
    why: str
    size_bytes: int


@dataclass(frozen=True)
class GcReport:
    """What was removed; after a dry run, what would be. A workspace goes to the trash first."""

    dry_run: bool
    items: tuple[GcItem, ...]


class Cleaning:
    """Looks again and again, so that it knows how old things are whatever a clock says."""

    def __init__(
        self,
        workspaces: Workspaces,
        ledger: Ledger,
        *,
        keep_s: float,
        guard: Wards,
        snapshots: Snapshots,
    ) -> None:
        """`keep_s` is the retention; 0 keeps everything."""
        self._snapshots = snapshots
        self._workspaces = workspaces
        self._ledger = ledger
        self._keep_s = keep_s
        self._guard = guard
        self._ages: _AllAges | None = None

    async def tidy(self, *, watched_s: float = 0.0) -> None:
        """Take in what there is, and empty the trash of what is due.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        seen = await self._look()
        await self._empty_trash(seen, watched_s, dry_run=False)
        await self._sweep_skills(dry_run=False)

    async def collect(self, *, dry_run: bool = False, watched_s: float = 0.0) -> GcReport:
        """Remove what is due and was watched for so long, or with `dry_run` only say what is.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        seen = await self._look()
        in_use = await self._guard.in_use()
        found = due(seen.chats, keep_s=self._keep_s, in_use=in_use, watched_s=watched_s)
        items = [item for one in found if (item := await self._take(one, dry_run))]
        items += await self._empty_trash(seen, watched_s, dry_run)
        items += await self._end_leftovers(seen, dry_run)
        items += await self._sweep_skills(dry_run)
        return GcReport(dry_run, tuple(items))

    async def _look(self) -> "_Seen":
        now = self._ledger.clock()
        if self._ages is None:
            anchor = await to_thread.run_sync(recall, self._workspaces.data_root, now)
            self._ages = _AllAges(anchor, Ages(anchor), Ages(anchor))
        # Before the directories: a record that comes in between has its directory.
        await self._ledger.write()
        await self._ledger.read()
        known = self._ledger.all()
        items = await self._workspaces.trashed(measured=False)
        chats = await self._workspaces.chats()
        for chat in chats:
            if self._ledger.get(chat) is None:
                # When it was used last nobody knows: that counts as now.
                self._ledger.note(chat, "warm")
        here = {*chats, *(item.chat for item in items)}
        for record in known:
            if record.chat not in here:
                self._ledger.forget(record.chat)
        stamps = {record.chat: record.last_used_at.timestamp() for record in self._ledger.all()}
        await to_thread.run_sync(self._remember, now, self._ages.anchor)
        return _Seen(
            self._ages.chats.look({chat: stamps.get(chat) for chat in chats}, now),
            self._ages.trash.look({item.name: item.discarded_at for item in items}, now),
        )

    def _remember(self, now: Moment, anchor: Moment) -> None:
        try:
            remember(self._workspaces.data_root, now, anchor)
        except OSError as exc:
            logger.warning("the time could not be written down for the next server: %s", exc)

    async def _take(self, one: Due, dry_run: bool) -> GcItem | None:
        """Throw a chat's files into the trash, unless it was used since it was looked at."""
        chat = one.chat
        size = (await self._workspaces.meter(chat).usage()).used_bytes
        if not dry_run and not await self._remove(chat):
            return None
        return GcItem("workspace", str(chat), one.why, size)

    async def _remove(self, chat: ChatId) -> bool:
        before = self._ledger.get(chat)
        async with self._guard.lock(chat):
            await self._ledger.read()
            if chat in await self._guard.in_use() or self._ledger.get(chat) != before:
                return False
            await self._workspaces.remove(chat)
            await self._guard.forget(chat)
        self._ledger.note(chat, "terminated")
        logger.info("chat %s: its files are in the trash, nobody used it for long", chat)
        return True

    async def _end_leftovers(self, seen: "_Seen", dry_run: bool) -> list[GcItem]:
        return [
            GcItem("sandbox", str(chat), "runs for a chat that has no files", 0)
            for sandbox_id, chat in (await self._guard.sandboxes()).items()
            if chat not in seen.chats
            and (dry_run or await self._guard.end_leftover(sandbox_id, chat))
        ]

    async def _sweep_skills(self, dry_run: bool) -> list[GcItem]:
        sweep = partial(self._snapshots.sweep, dry_run=dry_run)
        swept = await to_thread.run_sync(lambda: list(sweep()))
        why = f"a copy of a skill that no chat has had for {in_words(KEPT_S)}"
        return [GcItem("skill", name, why, size) for name, size in swept]

    async def _empty_trash(self, seen: "_Seen", watched_s: float, dry_run: bool) -> list[GcItem]:
        old = set(outdated(seen.trash, TRASH_KEPT_S, watched_s))
        if not old:
            return []
        items = [item for item in await self._workspaces.trashed() if item.name in old]
        if not dry_run:
            report = await self._workspaces.empty_trash(is_due=old.__contains__)
            if report.stuck:
                logger.warning("the trash holds what cannot be deleted: %s", report.stuck)
            items = [item for item in items if item.name in report.deleted]
        return [
            GcItem(
                "trash",
                str(item.chat or item.name),
                f"discarded {in_words(seen.trash[item.name].idle_s)} ago; kept for "
                f"{in_words(TRASH_KEPT_S)}",
                item.allocated_bytes,
            )
            for item in items
        ]


@dataclass(frozen=True)
class _AllAges:
    anchor: Moment
    chats: Ages[ChatId]
    trash: Ages[str]


@dataclass(frozen=True)
class _Seen:
    chats: Mapping[ChatId, Age]
    trash: Mapping[str, Age]
