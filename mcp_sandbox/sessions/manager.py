"""All chats of one data root: one hold per chat, and at most so many open sandboxes."""

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.errors import OperatorError, SandboxError, StorageUnavailable
from mcp_sandbox.models import BackendName, ChatId, SessionStatus, Statistics
from mcp_sandbox.sessions.chat_lock import ChatLocks
from mcp_sandbox.sessions.cleaning import Cleaning, GcReport
from mcp_sandbox.sessions.drain import Drain
from mcp_sandbox.sessions.extras import Extras, no_extras
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.listing import statuses
from mcp_sandbox.sessions.news import News
from mcp_sandbox.sessions.reaper import Reaper
from mcp_sandbox.sessions.residence import Residence
from mcp_sandbox.sessions.rooms import Rooms
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.sessions.slots import Slots
from mcp_sandbox.sessions.wards import Wards
from mcp_sandbox.sessions.warm import WarmPool
from mcp_sandbox.sessions.warming import Warmer
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.pool import PoolFolder

logger = logging.getLogger(__name__)

# A store that does not answer is not waited for at the end: it is a cache.
_LAST_WORDS_S = 10.0
# Calls that are being cancelled end when all that they started is dead.
_LAST_CALLS_S = 10.0


class SessionManager:
    """Finds the session of a chat. Enter it; every sandbox it opened ends with the block."""

    def __init__(
        self,
        backend: Backend,
        workspaces: Workspaces,
        *,
        ledger: Ledger,
        settings: SessionSettings | None = None,
        extras: Extras | None = None,
        pool: PoolFolder | None = None,
    ) -> None:
        """`pool`: where trees wait for new chats; without it no sandbox is started early."""
        data_root = workspaces.data_root
        self._backend = backend
        self._workspaces = workspaces
        self._extras = extras or no_extras(data_root)
        self._settings = settings or SessionSettings()
        self._residence = Residence(data_root, may_move=self._settings.may_move)
        self._slots = Slots(
            self._settings.max_open,
            most_per_user=self._settings.max_per_user,
            wait_s=self._settings.queue_wait_s,
        )
        self._ledger = ledger
        self._locks = ChatLocks(data_root)
        self._snapshots = Snapshots(data_root)
        lifetimes = self._settings.lifetimes
        self._wards = Wards(backend, workspaces, self._locks, self._residence, own=self._own_chats)
        self._cleaning = Cleaning(
            workspaces,
            ledger,
            keep_s=lifetimes.retention_s,
            guard=self._wards,
            snapshots=self._snapshots,
        )
        self._reaper = Reaper(self._open_holds, ledger, self._cleaning, lifetimes)
        self._drain = Drain()
        self._handing_over = False
        self._tasks = anyio.create_task_group()
        self._closed = anyio.Event()
        self._pool_folder = pool
        self._rooms: Rooms | None = None
        # A hold lives as long as a session has it or its sandbox is open (then it has a slot):
        # so a chat never has two, and what nobody uses takes no memory.
        self._holds: WeakValueDictionary[ChatId, Hold] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        with anyio.CancelScope(shield=True):
            # Who is cancelled here could not leave the group that was entered.
            tasks: TaskGroup = await self._tasks.start(self._host)
        self._rooms = Rooms(
            backend=self._backend,
            workspaces=self._workspaces,
            projects=self._extras.projects,
            residence=self._residence,
            locks=self._locks,
            news=News(),
            settings=self._settings,
            slots=self._slots,
            ledger=self._ledger,
            tasks=tasks,
            drain=self._drain,
            snapshots=self._snapshots,
            pool=self._make_pool(self._pool_folder, tasks) if self._pool_folder else None,
        )
        if self._rooms.pool:
            self._rooms.pool.start()
        tasks.start_soon(self._reaper.run)
        if self._settings.keep_background:
            tasks.start_soon(self._take_over)
        else:
            tasks.start_soon(self._wards.wake)
        return self

    async def _host(self, *, task_status: TaskStatus[TaskGroup]) -> None:
        """Run what sandboxes need, also while a cancelled block still brings them to their end."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await self._closed.wait()
                tasks.cancel_scope.cancel()

    async def _take_over(self) -> None:
        """Hold what runs for chats already; end what runs for a chat that is no more."""
        try:
            running = await self._wards.sandboxes()
            chats = set(await self._workspaces.chats())
        except OperatorError:
            logger.exception("what runs already is found when its chat is used")
            return
        for sandbox_id, chat in running.items():
            try:
                if chat in chats:
                    await self._hold(chat).adopt(sandbox_id)
                else:
                    await self._wards.end_leftover(sandbox_id, chat)
            except SandboxError:
                logger.exception("chat %s: what runs already is found when it is used", chat)

    def _make_pool(self, folder: PoolFolder, tasks: TaskGroup) -> WarmPool:
        settings = self._settings
        warmer = Warmer(self._backend, folder, settings.spec, keep_bytes=settings.keep_bytes)
        return WarmPool(
            warmer,
            tasks,
            size=settings.pool_size,
            max_age_s=settings.pool_max_age_s,
            free=lambda: self._slots.free,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            with anyio.CancelScope(shield=True):
                await self.drain(_LAST_CALLS_S, hand_over=self._handing_over)
                async with anyio.create_task_group() as closing:
                    for hold in self._open_holds():
                        closing.start_soon(self._close, hold)
                    if self._rooms and self._rooms.pool:
                        closing.start_soon(self._rooms.pool.stop)
                with anyio.move_on_after(_LAST_WORDS_S):
                    await self._ledger.write()
        finally:
            self._closed.set()
        # The group must see a cancellation; any other error of the block is the caller's own and
        # must reach it as it is, not wrapped in a group.
        if isinstance(value, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(kind, value, trace)
        await self._tasks.__aexit__(None, None, None)
        return None

    async def _close(self, hold: Hold) -> None:
        """End its sandbox unless it is to stay, or others need it."""
        try:
            if not self._handing_over:
                await hold.yield_up(background_too=not self._settings.keep_background)
        except OperatorError:
            logger.exception("chat %s: its sandbox ends by itself", hold.chat)
        finally:
            await hold.disconnect()

    def _open_holds(self) -> Sequence[Hold]:
        open_ones = set(self._slots.taken())
        return [hold for hold in self._holds.values() if hold in open_ones]

    def _own_chats(self) -> set[ChatId]:
        """The chats that this server uses, or is about to."""
        return {hold.chat for hold in [*self._holds.values()] if hold.is_busy or hold.use().open}

    @property
    def backend(self) -> BackendName:
        """Where the sandboxes live."""
        return self._backend.name

    async def session(self, chat: ChatId) -> Session:
        """The chat's session; its sandbox is made at the first call that needs it."""
        hold = self._hold(chat)
        return Session(hold, self._extras.skills.of(chat, hold))

    def _hold(self, chat: ChatId) -> Hold:
        if self._rooms is None:
            raise RuntimeError("the manager is not open: use `async with`")
        hold = self._holds.get(chat)
        if hold is None:
            hold = self._holds[chat] = Hold(chat, self._rooms)
        return hold

    async def list(self, user: str | None = None) -> Sequence[SessionStatus]:
        """Every known chat, or those of a user, the last used first.

        Raises:
            OperatorError: the data root or the engine cannot be used.
        """
        running = await self._backend.running()
        holds = dict(self._holds)
        known = {*holds, *await self._workspaces.chats()}
        await self._ledger.read()
        times = {chat: self._ledger.times(chat) for chat in known if user in (None, chat.user)}
        uses = {chat: hold.use() for chat, hold in holds.items()}
        return statuses(times, running, uses, self._backend.name)

    async def size(self, chat: ChatId) -> int | None:
        """How many bytes the chat's files occupy, if they can be measured."""
        try:
            return (await self._workspaces.meter(chat).usage()).used_bytes
        except StorageUnavailable:
            return None

    async def stop(self, chat: ChatId) -> bool:
        """End the chat's sandbox and all that runs in it; files stay. False when none ran."""
        return await self._hold(chat).end()

    async def remove(self, chat: ChatId) -> None:
        """End the chat's sandbox, and throw its files and its home into the trash.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        await self._hold(chat).end("remove")

    async def collect(self, *, dry_run: bool = False) -> GcReport:
        """Remove what is due now: chats that nobody used for long, and the trash of yesterday.

        Sandboxes of chats that have no files are ended.

        With `dry_run` it only says what, and why.

        Raises:
            OperatorError: the data root or the engine cannot be used.
        """
        return await self._cleaning.collect(dry_run=dry_run)

    def statistics(self) -> Statistics:
        """What this server holds now."""
        taken = self._slots.taken()
        return Statistics(
            open=len(taken),
            busy=sum(slot.is_busy for slot in taken),
            queued=self._slots.waiting,
            max_open=self._settings.max_open,
            background=sum(hold.use().background for hold in list(self._holds.values())),
            pool=self._rooms.pool.statistics() if self._rooms and self._rooms.pool else {},
        )

    async def drain(self, seconds: float, *, hand_over: bool = False) -> None:
        """Take no new call, and wait at most so long for those under way.

        Who calls now gets Draining, an OperatorError. With `hand_over` every sandbox is left, at
        the end, for another server to take over.
        """
        self._drain.begun = True
        self._handing_over = hand_over
        with anyio.move_on_after(seconds):
            while any(hold.use().calls for hold in list(self._holds.values())):
                await self._drain.next_end()
