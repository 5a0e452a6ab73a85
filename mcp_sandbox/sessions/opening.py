"""Finds the sandbox of a chat, whichever server has made it, or makes one.

Whoever calls has the chat's lock: so two servers never make two, and none comes upon one that is
half made. Which sandbox it is is remembered beside the chat's residence; where that is lost, the
labels tell. A sandbox is the chat's if its runner shows the chat's own directory.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId, Mount, SandboxId, SandboxSpec
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.connect import connect
from mcp_sandbox.sessions.leaving import DYING_S
from mcp_sandbox.sessions.listing import chat_of
from mcp_sandbox.sessions.obituary import cause, ended_with
from mcp_sandbox.sessions.rooms import Held, Opened, Rooms
from mcp_sandbox.sessions.spec import SPEC, STARTED, marked
from mcp_sandbox.workspace.directory import ChatDirectories
from mcp_sandbox.workspace.projects import Shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """How the chat's sandbox should be."""

    spec: SandboxSpec
    directories: ChatDirectories
    shown: Shown

    def is_shown_by(self, runtime: Runtime) -> bool:
        """Whether its /project is the folder that was checked.

        The engine finds it by its path, and by then another may lie there, put by whoever may
        write beside it.
        """
        checked, seen = self.shown.identity, runtime.hello.project
        return checked is None or (seen is not None and seen.is_same(checked))


class Opening:
    """The way to the sandbox of one chat."""

    def __init__(self, chat: ChatId, rooms: Rooms) -> None:
        self._chat = chat
        self._rooms = rooms

    async def open(self) -> Opened:
        """Find the chat's sandbox, or make one.

        Raises:
            OperatorError: none can be made.
            SandboxGone: it came up without the chat's files.
        """
        rooms = self._rooms
        is_new = await rooms.residence.settle(self._chat, rooms.backend.name)
        shown = await rooms.projects.show(self._chat)
        may_adopt = is_new and not shown.mounts
        adopted = await rooms.pool.adopt(self._chat) if rooms.pool and may_adopt else None
        if adopted:
            opened = Opened(*adopted, shown)
        else:
            directories = await rooms.workspaces.open(self._chat)
            wanted = Wanted(await self._spec(directories, shown.mounts), directories, shown)
            # A sandbox of a chat that never had one need not be looked for.
            found, news = (None, "") if is_new else await self._find(wanted)
            with rooms.pool.foreground() if rooms.pool else nullcontext():
                opened = Opened(*(found or await self._make(wanted)), shown, news)
        await rooms.residence.remember(self._chat, opened.sandbox.id)
        return opened

    async def adopt(self, sandbox_id: SandboxId) -> Opened | None:
        """Connect to a sandbox that runs already; None if it is of no use, and has been removed."""
        directories = await self._rooms.workspaces.open(self._chat)
        # Before the connection: what fails after it would leave it open.
        shown = await self._rooms.projects.show(self._chat)
        reached = await self._reach(sandbox_id, directories)
        if reached is None:
            return None
        await self._rooms.residence.remember(self._chat, sandbox_id)
        return Opened(*reached, shown)

    async def labelled(self) -> Sequence[SandboxId]:
        """The sandboxes that carry the chat's labels."""
        running = await self._rooms.backend.running()
        return [info.id for info in running if chat_of(info.labels) == self._chat]

    async def _find(self, wanted: Wanted) -> tuple[tuple[Sandbox, Runtime] | None, str]:
        """The chat's sandbox if one runs and is as it should be; and what became of another."""
        news = ""
        for candidates in (self._remembered, self.labelled):
            for sandbox_id in await candidates():
                reached = await self._reach(sandbox_id, wanted.directories)
                if reached is None:
                    continue
                replaced = await self._replace(*reached, wanted)
                if replaced is None:
                    return reached, ""
                news = replaced
        return None, news

    async def _remembered(self) -> Sequence[SandboxId]:
        remembered = await self._rooms.residence.sandbox(self._chat)
        return [remembered] if remembered else []

    async def _reach(
        self, sandbox_id: SandboxId, directories: ChatDirectories
    ) -> tuple[Sandbox, Runtime] | None:
        """Connect to it; one that is dead, stuck or without the chat's files is removed."""
        rooms = self._rooms
        try:
            sandbox = await rooms.backend.attach(sandbox_id)
            if chat_of(sandbox.labels) != self._chat:
                return None
            keep_bytes = rooms.settings.keep_bytes
            return sandbox, await connect(sandbox, directories, rooms.tasks, keep_bytes)
        except SandboxGone as exc:
            logger.info("chat %s: sandbox %s is of no use: %s", self._chat, sandbox_id, exc)
            await rooms.backend.destroy(sandbox_id)
            return None

    async def renew(self, held: Held) -> str | None:
        """End an open sandbox if it is not as it should be now; what to tell, or None if it stays.

        Raises:
            OperatorError: it cannot be told how it should be.
        """
        directories = await self._rooms.workspaces.open(self._chat)
        held.shown = await self._rooms.projects.show(self._chat)
        spec = await self._spec(directories, held.shown.mounts)
        wanted = Wanted(spec, directories, held.shown)
        return await self._replace(held.sandbox, held.runtime, wanted)

    async def _spec(self, directories: ChatDirectories, shown: tuple[Mount, ...]) -> SandboxSpec:
        now_s = self._rooms.ledger.clock().steady_s
        labels = {"user": self._chat.user, "chat": self._chat.chat, STARTED: f"{now_s:.0f}"}
        spec = self._rooms.settings.spec(directories, labels, shown)
        return marked(spec, await self._rooms.backend.origin(), directories)

    async def _replace(self, sandbox: Sandbox, runtime: Runtime, wanted: Wanted) -> str | None:
        is_same = sandbox.labels.get(SPEC) == wanted.spec.labels[SPEC]
        if is_same and wanted.is_shown_by(runtime):
            return None
        background = runtime.background
        try:
            background = (await runtime.status()).background
            refusal = await runtime.retire(background_too=True)
        except SandboxGone:
            refusal = ""
        # What shows another folder under the same settings has been tricked into it.
        if refusal and not is_same:
            # One sandbox for all servers goes before each one's own settings.
            logger.warning(
                "chat %s: sandbox %s was made with other settings, and stays while it is used",
                self._chat,
                sandbox.id,
            )
            return None
        await runtime.aclose()
        await self._rooms.backend.destroy(sandbox.id)
        return (
            "The sandbox was replaced because its settings or its image changed; files are kept."
            f"{ended_with(background)}"
        )

    async def _make(self, wanted: Wanted) -> tuple[Sandbox, Runtime]:
        rooms = self._rooms
        if not wanted.directories.cleared:
            for moved in await rooms.workspaces.clear_way(self._chat):
                logger.info("chat %s: %s", self._chat, moved)
                rooms.news.tell(self._chat, moved)
        sandbox = await rooms.backend.create(wanted.spec)
        try:
            keep_bytes = rooms.settings.keep_bytes
            runtime = await connect(sandbox, wanted.directories, rooms.tasks, keep_bytes)
        except SandboxGone as exc:
            try:
                ending = await sandbox.ending(within_s=DYING_S)
            finally:
                await rooms.backend.destroy(sandbox.id)
            why = cause(ending, rooms.settings.limits) if ending else str(exc)
            raise SandboxGone(f"the sandbox ended as soon as it was started: {why}") from exc
        except BaseException:
            await rooms.backend.destroy(sandbox.id)
            raise
        if wanted.is_shown_by(runtime):
            return sandbox, runtime
        await runtime.aclose()
        await rooms.backend.destroy(sandbox.id)
        raise SandboxGone(
            "the user's folder was replaced while the sandbox was made, which was then removed "
            "before anything ran in it: call again"
        )
