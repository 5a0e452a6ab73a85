"""All chats of one data root: one `ChatSandbox` each, and a limit on open sandboxes."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mcp_sandbox.backends.base import Pooled
from mcp_sandbox.errors import (
    ChatElsewhere,
    ConfigError,
    OperatorError,
    SandboxError,
    SandboxGone,
    StorageUnavailable,
    Unsupported,
)
from mcp_sandbox.models import BackendName, ChatId, SandboxInfo, SessionStatus, Statistics
from mcp_sandbox.sessions.chat_records import (
    CONTROL,
    AssistantSpec,
    ChatRecord,
    UseTimes,
    read_assistant_spec,
    read_object,
)
from mcp_sandbox.sessions.cleaning import Cleaner, Reaper
from mcp_sandbox.sessions.gate import Action, Gate, PolicyCheck
from mcp_sandbox.sessions.previews import Previews
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
from mcp_sandbox.sessions.sandbox.context import ChatUse, SessionContext
from mcp_sandbox.sessions.sandbox.warm_pool import WarmPool
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.sessions.settings import SPEC, list_chat_sandboxes
from mcp_sandbox.sessions.skills import ChatSkills, Skills
from mcp_sandbox.telemetry.calls import Count
from mcp_sandbox.workspace.directory import TrashItem
from mcp_sandbox.workspace.pool import PoolFolder
from mcp_sandbox.workspace.projects import PROJECT

if TYPE_CHECKING:
    from mcp_sandbox.sessions.saving import Saving

logger = logging.getLogger(__name__)

# How long the end waits for a disk that does not answer.
_LAST_WORDS_S = 10.0
# A server that lives shorter than this leaves alone what other servers left behind.
_SETTLED_S = 5.0
# How long the end waits for the last save of a chat; the next server goes on with it.
_LAST_SAVE_S = 30.0
# A cancelled call ends when all that it started is dead.
_LAST_CALLS_S = 10.0
# How long a runner that is asked whether it is well may take.
_ANSWER_S = 5.0
_CLOSED = (
    "this session cannot be used any more: the `async with` block that opened it has ended, or is "
    "ending. Call inside the block, or open the chat again with open_session(); its files are "
    "kept"
)


def name_session(chat: ChatId) -> str:
    """Return a short name of the chat that is the same in every server."""
    return hashlib.sha256(str(chat).encode()).hexdigest()[:24]


class SessionManager:
    """Finds the session of a chat. Used with `async with`; its sandboxes end with the block.

    Any method may raise OperatorError: the data root or the engine cannot be used.
    """

    def __init__(
        self,
        context: SessionContext,
        skills: Skills,
        judge: PolicyCheck,
        *,
        count: Count | None = None,
        pool: PoolFolder | None = None,
    ) -> None:
        """`count` gets the record of every ended call; without `pool` none is started early."""
        self._context = context
        self._skills = skills
        self._pool_folder = pool
        # Where the sandboxes live, how they reach allowed hosts, and who saves their files.
        self.backend: BackendName = context.backend.name
        self.keeps_paused_processes = not context.backend.keeps_paused_files
        self.egress, self.ways_out = context.egress, context.ways_out
        self.leases = context.leases
        self.saving = context.saving
        if self.saving:
            self.saving.hold_of = self._hold
        self.use_times: UseTimes = context.use_times
        self._saved = self.saving.before_end if self.saving else nullcontext
        self._cleaning = Cleaner(
            context, self._own_chats, lambda chat, found: self._hold(chat).adopt(found)
        )
        self.collect, self.trashed = self._cleaning.collect, context.workspaces.trashed
        self._reaper = Reaper(self._open_holds, self._cleaning, context.settings)
        self._judge = judge
        self.approvals = judge.approvals
        self._gate = Gate(self._hold, judge, context.audit, count)
        # Answers the calls that wait for processes, which go on running for the next server.
        self.answer_waiting = self._gate.answer_waiting
        self._handing_over = self._entered = False
        self._tasks = anyio.create_task_group()
        self._closed = anyio.Event()
        # It lives as long as a session refers to it or its sandbox is open (then it has a
        # slot): so a chat never has two, and an unused one takes no memory.
        self._holds: WeakValueDictionary[ChatId, ChatSandbox] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        with anyio.CancelScope(shield=True):
            # A cancellation here would leave the entered group without its exit.
            tasks: TaskGroup = await self._tasks.start(self._host)
        context, folder = self._context, self._pool_folder
        context.tasks, self._entered = tasks, True
        if folder and isinstance(context.backend, Pooled):
            context.pool = WarmPool(
                context.backend, folder, context.settings, tasks, free=lambda: context.capacity.free
            )
            context.pool.start()
        tasks.start_soon(self._reaper.run)
        if self.leases:
            self.leases.list_used = self._own_chats
            self.leases.count_free = lambda: context.capacity.free
            self.leases.stop_chat = lambda chat, why, lost: self._hold(chat).let_go(why, lost=lost)
            tasks.start_soon(self.leases.run)
        if self.saving:
            tasks.start_soon(self.saving.run)
        tasks.start_soon(self._look_at_others)
        return self

    async def _host(self, *, task_status: TaskStatus[TaskGroup]) -> None:
        """Run the tasks of sandboxes, also while a cancelled block still ends these."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await self._closed.wait()
                tasks.cancel_scope.cancel()

    async def _look_at_others(self) -> None:
        """Take over, or end, sandboxes that other servers left behind."""
        try:
            if self._context.settings.keep_background:
                unknown = await self._take_over()
                while unknown and self.leases:
                    await anyio.sleep(_SETTLED_S)
                    unknown = await self._take_over()
            await anyio.sleep(_SETTLED_S)
            await self._cleaning.end_left()
        except OperatorError:
            logger.exception("cannot list running sandboxes; a chat's next call finds its own")

    async def _take_over(self) -> int:
        """Connect to the sandboxes that run already, where their chats exist.

        Return for how many it cannot be told whether their chats are still this server's.
        """
        unknown = 0
        running = await list_chat_sandboxes(self._context.backend)
        chats = set(await self._context.workspaces.chats())
        for chat, info in running:
            try:
                if chat in chats and info.state != "paused":
                    await self._hold(chat).adopt(info.id)
            except ChatElsewhere:
                # What it alone holds is saved, as older files, when the chat is here again.
                if not self._context.files.lost_with_sandbox:
                    await self._context.backend.destroy(info.id)
            except SandboxError as exc:
                unknown += isinstance(exc, StorageUnavailable)
                logger.exception("chat %s: cannot take over its sandbox until its next call", chat)
        return unknown

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            with anyio.CancelScope(shield=True):
                self._gate.close(_CLOSED)
                await self.drain(_LAST_CALLS_S, hand_over=self._handing_over)
                async with anyio.create_task_group() as closing:
                    for hold in self._open_holds():
                        closing.start_soon(self._close, hold)
                    if self._context.pool:
                        closing.start_soon(self._context.pool.stop)
                if self.saving:
                    await self.saving.forget_saved()
                with anyio.move_on_after(_LAST_WORDS_S):
                    await self._context.use_times.write()
        finally:
            self._closed.set()
        # The group must see a cancellation; any other error of the block is the caller's own and
        # must reach it as it is, not wrapped in a group.
        if isinstance(value, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(kind, value, trace)
        await self._tasks.__aexit__(None, None, None)
        return None

    async def _close(self, hold: ChatSandbox) -> None:
        """End its sandbox unless it is to stay, is paused, or other servers use it."""
        try:
            if not (self._handing_over or hold.use().paused):
                with anyio.move_on_after(_LAST_SAVE_S):
                    async with self._saved(hold.chat):
                        pass
                await hold.release_if_idle(
                    background_too=not self._context.settings.keep_background
                )
        except OperatorError:
            logger.exception("chat %s: cannot end its sandbox; it ends itself", hold.chat)
        finally:
            await hold.disconnect()

    def _open_holds(self) -> Sequence[ChatSandbox]:
        open_ones = set(self._context.capacity.list_taken())
        return [hold for hold in self._holds.values() if hold in open_ones]

    def _own_chats(self) -> set[ChatId]:
        """Return the chats that this server uses, or is about to."""
        return {hold.chat for hold in [*self._holds.values()] if hold.is_busy or hold.use().open}

    async def session(
        self, chat: ChatId, assistant: AssistantSpec | None = None, *, judged: bool = False
    ) -> Session:
        """Return the chat's session; its sandbox is made at the first call that needs it.

        An `assistant` sets what sandboxes are made from, in every server; one in use stays.
        `judged`: the policy decides about what is run, as about all that agents do.
        """
        hold = self._hold(chat)
        if assistant is not None:
            if assistant.names_image and not self._context.backend.takes_images:
                raise ConfigError(
                    f"backend {self.backend} has no images, and assistant {assistant.name} names "
                    f"{assistant.image}: take `image` out of it, or name another backend"
                )
            # Raises for an unknown image: noted, it would leave the chat's other clients with none.
            await self._context.backend.origin(assistant.image)
            kept, now_s = asdict(assistant), self.use_times.clock().wall_s
            await self.use_times.records.keep(chat, "assistant", lambda _: kept, now_s)
            hold.is_outdated = True
        skills = ChatSkills(chat, self._skills, hold.pins, self._gate)
        previews = Previews(chat, self._gate, self._context)
        return Session(hold, self._gate, skills, previews, judged=judged)

    def _hold(self, chat: ChatId) -> ChatSandbox:
        if not self._entered:
            raise RuntimeError("the manager is not open: use `async with`")
        hold = self._holds.get(chat)
        if hold is None:
            hold = self._holds[chat] = ChatSandbox(chat, self._context)
        return hold

    async def list(self, user: str | None = None) -> Sequence[SessionStatus]:
        """Return every known chat, or those of a user, the last used first."""
        uses = {chat: hold.use() for chat, hold in self._holds.items()}
        running = {chat: use.sandbox for chat, use in uses.items() if use.sandbox}
        running.update(await list_chat_sandboxes(self._context.backend))
        records = {record.chat: record for record in await self._context.use_times.records.list()}
        prepared = (chat for chat, record in records.items() if read_object(record, CONTROL))
        elsewhere = await self.leases.find_elsewhere(records) if self.leases else {}
        for chat in elsewhere:
            if found := records[chat].sandbox_id:
                running[chat] = SandboxInfo(found, {}, "running")
        known = {*uses, *await self._context.workspaces.chats(), *prepared, *running}
        rows = [
            replace(
                self._status(chat, records.get(chat), running.get(chat), uses.get(chat, ChatUse())),
                server=elsewhere.get(chat, ""),
            )
            for chat in known
            if user in (None, chat.user)
        ]
        return sorted(rows, key=lambda row: row.last_used_at, reverse=True)

    def _status(
        self, chat: ChatId, record: ChatRecord | None, sandbox: SandboxInfo | None, use: ChatUse
    ) -> SessionStatus:
        created_at, last_used_at = self._context.use_times.times(chat, record)
        saved_at, unsaved = self.saving.status(chat, record) if self.saving else (None, False)
        noted = reversed([*read_object(record, PROJECT)])
        return SessionStatus(
            id=name_session(chat),
            chat=chat,
            state=sandbox.state if sandbox else "starting" if use.starting else "warm",
            backend=self.backend if sandbox else (record and record.backend) or self.backend,
            sandbox_id=sandbox.id if sandbox else None,
            created_at=created_at,
            last_used_at=last_used_at,
            image=use.image,
            spec=sandbox.labels.get(SPEC, "") if sandbox else "",
            busy=use.calls,
            background=use.background,
            assistant=read_assistant_spec(record).name,
            saved_at=saved_at,
            unsaved=unsaved,
            preview=use.preview,
            folder=str(self._context.projects.folder(chat) or next(noted, "")),
        )

    async def status(self, chat: ChatId) -> SessionStatus | None:
        """Return one chat; None if it was never used."""
        record, hold = await self.use_times.records.look(chat), self._holds.get(chat)
        if not (record or hold or await self._context.workspaces.exist(chat)):
            return None
        use = hold.use() if hold else ChatUse()
        found = use.sandbox
        if not (found or use.starting):
            found = dict(await list_chat_sandboxes(self._context.backend)).get(chat)
        return self._status(chat, record, found, use)

    async def open(self, chat: ChatId) -> None:
        """Make the chat's sandbox if there is none. Raises what a call in it does."""
        async with self._gate.enter(Action(chat, "prepare")):
            pass

    async def answers(self, chat: ChatId) -> bool:
        """Return whether the runner of the chat's open sandbox answers within seconds."""
        with suppress(SandboxGone), anyio.move_on_after(_ANSWER_S):
            async with self._hold(chat).open_for_save() as held:
                await held.runtime.status()
                return True
        return False

    async def size(self, chat: ChatId) -> int | None:
        """Return how many bytes the chat's files occupy; None if they cannot be measured."""
        with suppress(StorageUnavailable):
            usage = await self._context.workspaces.open_disk_usage(chat).usage()
            # Of a sandbox that another server had nothing is known.
            return usage.used_bytes or (None if self._context.files.lost_with_sandbox else 0)
        return None

    async def stop(self, chat: ChatId, *, if_idle: bool = False, force: bool = False) -> bool:
        """End the chat's sandbox and all that runs in it; files stay. Return False if none ran.

        `if_idle`: it stays while a call is under way, and only then False is returned. Raises
        Unsaved: it alone holds files that cannot be saved; by `force` it is ended all the same.
        """
        async with self._saved(chat):
            hold = self._hold(chat)
            if if_idle:
                return await hold.release_if_idle(background_too=True)
            return await hold.end(force=force)

    async def pause(self, chat: ChatId) -> bool:
        """Stop all that runs in the chat's sandbox, until the next call; False when none runs.

        It is ended when it was not used for `sessions.remove_after`.

        Raises:
            Busy: a call is under way in it, or another server has it open.
            Unsupported: the backend cannot pause.
        """
        async with self._saved(chat):
            return await self._hold(chat).pause()

    async def resume(self, chat: ChatId) -> bool:
        """Let the chat's paused sandbox go on; False where none is paused."""
        return await self._hold(chat).resume()

    async def remove(self, chat: ChatId) -> None:
        """End the chat's sandbox, throw its files into the trash, and delete its backups."""
        if self.leases:
            await self.leases.hold(chat)
        if self.saving:
            await self.saving.remove(chat)
        await self._hold(chat).end("remove")

    async def take_back(self, chat: ChatId, item: TrashItem) -> None:
        """End the chat's sandbox, and exchange its files for those that lie in the trash."""
        if self.leases:
            await self.leases.hold(chat)
        await self._hold(chat).end(item)
        if self.saving:
            self.saving.note_call(chat)

    @property
    def backups(self) -> "Saving":
        """Return what saves, lists and restores; raises Unsupported if there is no object store."""
        if self.saving is None:
            raise Unsupported(
                "nothing saves the files of chats here: set storage.endpoint and its keys"
            )
        return self.saving

    def statistics(self) -> Statistics:
        taken = self._context.capacity.list_taken()
        return Statistics(
            open=len(taken),
            busy=sum(slot.is_busy for slot in taken),
            queued=self._context.capacity.waiting,
            max_open=self._context.settings.sessions.max_open,
            background=sum(hold.use().background for hold in list(self._holds.values())),
            pool=self._context.pool.statistics() if self._context.pool else {},
            connections={**self.egress.counts} if self.egress else {},
            unsaved=self.saving.unsaved if self.saving else None,
            leases=len(self.leases.own) if self.leases else None,
        )

    async def drain(self, seconds: float, *, hand_over: bool = False) -> None:
        """Refuse new calls with Draining, and wait up to `seconds` for those under way.

        With `hand_over` every sandbox is left running for another server to take over.
        """
        self._gate.close("this sandbox server is about to end: call again in a moment")
        self._handing_over = hand_over
        if self.leases:
            await self.leases.leave()
        with anyio.move_on_after(seconds):
            await self._gate.wait_empty()
