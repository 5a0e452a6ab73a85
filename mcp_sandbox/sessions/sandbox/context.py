"""What all chats' sandboxes of one manager share, and what an open one has.

Each open sandbox has a guard, which keeps its chat to the limits on disk, also between calls.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.audit import Audit
from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.config.values import MIB, show_size
from mcp_sandbox.egress.ways_out import Door, Way, WaysOut
from mcp_sandbox.errors import (
    NotFound,
    OperatorError,
    SandboxError,
    SandboxGone,
    StorageUnavailable,
    WorkspaceFull,
)
from mcp_sandbox.models import ChatId, Ending, ExecResult, Limits, SandboxInfo, SandboxState
from mcp_sandbox.runtime.channel import own_tasks
from mcp_sandbox.runtime.doors import DoorChannel, Handler
from mcp_sandbox.runtime.processes import LATE_S
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_records import ChatRecords, UseTimes
from mcp_sandbox.sessions.sandbox.capacity import Capacity
from mcp_sandbox.sessions.sandbox.files import HostFiles
from mcp_sandbox.sessions.sandbox.notices import Notices
from mcp_sandbox.sessions.sandbox.warm_pool import WarmPool
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.meter import DiskUsage
from mcp_sandbox.workspace.projects import Projects, ProjectView

if TYPE_CHECKING:
    # Loaded only by servers with allowed hosts.
    from mcp_sandbox.sessions.doors import Egress

    # Loaded only by servers with an object store.
    from mcp_sandbox.sessions.sandbox.sandbox_files import SandboxFiles
    from mcp_sandbox.sessions.saving import Saving

    # Loaded only by servers that share chats.
    from mcp_sandbox.storage.leases import Leases

logger = logging.getLogger(__name__)

_WORDS: dict[Ending, str] = {
    "memory": "it ran out of memory ({memory})",
    "killed": "it was killed from outside",
    "failed": "its runner failed",
    "ended": "it was ended",
    "lost": "the engine that ran it has lost it, as after a restart",
    "evicted": "the cluster evicted it from its node, or lost the node",
    "deleted": "somebody deleted it in the cluster",
    "changed": "somebody changed it in the cluster, so it was ended",
}
# How long a check of the disk waits for a call to begin, at most.
_BETWEEN_CALLS_S = 0.5
_TRY_AGAIN_S = 10.0
# A cancelled call ends when all that it started is dead.
_ENDING_S = 10.0
# Messages of the kernel and ends of programs, and what to tell the agent about each.
_FILE = "one file passed the limit on its size ({file_size}): write several"
_SMALL = "/tmp ({tmp}) and /dev/shm ({shm}) are small: use /workspace"  # noqa: S108
_BUS = f"bus errors mostly come of a full file system in memory: {_SMALL}"
_LIMITS = {
    "OUT OF MEMORY": "all that runs here, with files in /tmp and /dev/shm, had {memory}",
    **dict.fromkeys(("SIGXFSZ", "EXIT 153", "file too large", "file size limit exceeded"), _FILE),
    "no space left on device": _SMALL,
    **dict.fromkeys(("SIGBUS", "EXIT 135", "bus error", "sigbus"), _BUS),
}
_UNRESOLVED = ("name resolution", "eai_again", "resolve host", "unknownhost", "cannot run ssh")
_PROXIED = (
    "no names are looked up here, and connections go by the proxy in HTTPS_PROXY alone: use https, "
    "not ssh; aiohttp takes it with trust_env=True, Java with -Dhttps.proxyHost, Node.js from 22.21"
)


@dataclass
class SessionContext:
    """What chats' sandboxes of one manager share; `tasks` and `pool` are set while that is open.

    `addresses`: name and port of each preview so far; `previews_at`: the URL of one place for all.
    `egress` leads to allowed hosts, if any. `files`: where those of chats are; `saving` has their
    backups, if there is an object store. `leases`: those that this server has, if it shares chats.
    """

    backend: Backend
    workspaces: Workspaces
    projects: Projects
    use_times: UseTimes
    audit: Audit
    settings: SessionSettings
    ways_out: WaysOut
    notices: Notices = field(default_factory=Notices)
    addresses: dict[tuple[ChatId, int], tuple[str, int]] = field(default_factory=dict)
    previews_at: str = ""
    pool: WarmPool | None = None
    egress: "Egress | None" = None
    saving: "Saving | None" = None
    leases: "Leases | None" = None
    tasks: TaskGroup = field(init=False)
    capacity: Capacity = field(init=False)
    files: "HostFiles | SandboxFiles" = field(init=False)

    def __post_init__(self) -> None:
        self.files = HostFiles(self)
        most = self.settings.sessions
        self.capacity = Capacity(
            most.max_open, most_per_user=most.max_per_user, wait_s=most.queue_wait
        )

    @property
    def records(self) -> ChatRecords:
        return self.use_times.records

    def note_use(self, chat: ChatId, *, changes: bool) -> None:
        """Note that a call begins or ends; one that `changes` files has them saved."""
        self.use_times.note_use(chat)
        if changes and self.saving:
            self.saving.note_call(chat)

    def check_lease(self, chat: ChatId) -> int:
        """Return the epoch in which this server has the chat, 0 where servers share none.

        Raises StorageUnavailable: another server may have the chat.
        """
        if self.leases:
            self.leases.check(chat)
        return (self.leases and self.leases.epoch(chat)) or 0

    def age_s(self, held: "OpenSandbox") -> float:
        return self.use_times.clock().steady_s - held.started_s

    async def keeps_files(self, held: "OpenSandbox") -> bool:
        """Return whether the files of a sandbox that has ended are known to be there."""
        own, keeps = self.files.lost_with_sandbox, self.backend.keeps_paused_files
        here = [info.id for info in await self.backend.running()] if own and keeps else ()
        return not own or held.sandbox.id in here

    async def used_elsewhere(self, chats: Iterable[ChatId]) -> set[ChatId]:
        """Return those of the chats whose files here are in the hands of other servers."""
        if self.leases and self.leases.shares_files:
            return {*await self.leases.find_elsewhere(chats)}
        return set()

    def start_doors(self, chat: ChatId, held: "OpenSandbox") -> None:
        """Open the doors of a sandbox, and its way to allowed hosts if there is one."""
        sandbox, held.ways_out = held.sandbox, self.ways_out
        held.door_channel = DoorChannel(sandbox.open_channel, sandbox.token, self.tasks)
        if self.egress:
            held.doors = self.egress.make_door(chat, sandbox, partial(self.notices.add, chat))
            self.tasks.start_soon(self.egress.keep_open, held.doors)


class DiskGuard:
    """Ends the calls under way when the chat's files grow over a limit.

    If they grow without any call, something in the background writes: then that is stopped.
    """

    def __init__(self, meter: DiskUsage, stop_background: Callable[[], Awaitable[object]]) -> None:
        self._meter = meter
        self._stop_background = stop_background
        self._calls: set[anyio.CancelScope] = set()
        self._called = anyio.Event()
        self._left = anyio.Event()
        self._count = 0
        self._pauses = 0
        self._ended_calls = False
        self.watching = anyio.CancelScope()
        self.problem: SandboxError = WorkspaceFull("the workspace is full")

    @contextmanager
    def guard_call(
        self, *, may_end: bool = True, answers: bool = False
    ) -> Generator[anyio.CancelScope]:
        """Guard a call that may write; without `may_end` it is not ended for too many files.

        With `answers` the caller enters the scope, and has a result even if it is cancelled.

        Raises:
            WorkspaceFull, StorageUnavailable: it was ended because a limit was passed.
        """
        scope = anyio.CancelScope()
        if may_end:
            self._calls.add(scope)
        self._count += 1
        self._called.set()
        try:
            with nullcontext() if answers else scope:
                yield scope
        finally:
            self._calls.discard(scope)
            self._left.set()
            self._left = anyio.Event()
        if scope.cancelled_caught and not answers:
            raise type(self.problem)(f"the call was ended: {self.problem}")

    async def run(self) -> None:
        with self.watching:
            while True:
                calls_before, quiet, self._pauses = self._count, not self._calls, 0
                try:
                    found = await self._meter.wait_for_overshoot(self._pause)
                except StorageUnavailable:
                    logger.exception("cannot measure the workspace, so its limit does not hold")
                    await anyio.sleep(_TRY_AGAIN_S)
                    continue
                background = self._ended_calls or (quiet and self._count == calls_before)
                # A disk that fills up for another reason is none to end what runs here.
                if background and isinstance(found, WorkspaceFull):
                    logger.warning("stopping what writes in the background: %s", found)
                    await self._end_background()
                await self._end_calls(found)

    async def _pause(self, least_s: float) -> None:
        if self._pauses:
            # The measurement after the last pause was within the limits.
            self._ended_calls = False
        self._pauses += 1
        if not self._calls:
            self._called = anyio.Event()
            with anyio.move_on_after(_BETWEEN_CALLS_S):
                await self._called.wait()
        await anyio.sleep(least_s)

    async def _end_background(self) -> None:
        try:
            await self._stop_background()
        except OperatorError:
            # This task is one of the manager's: its failure would end every other chat's.
            logger.exception("the sandbox could not be ended; trying again if it goes on writing")
            await anyio.sleep(_TRY_AGAIN_S)

    async def _end_calls(self, found: SandboxError) -> None:
        """End the calls under way. The written files stay; new calls cannot write more.

        So if files still grow when these calls are dead, something in the background writes.
        """
        self.problem, ending = found, list(self._calls)
        self._ended_calls = bool(ending)
        for scope in ending:
            scope.cancel()
        with anyio.move_on_after(_ENDING_S):
            while self._calls.intersection(ending):
                await self._left.wait()


@dataclass(eq=False)
class OpenSandbox:
    """An open sandbox.

    `is_current` is False until it is known to be made as it should be. `notice` is what the agent
    should know of the sandbox before it; `loss` is what calls are told that lost their connection
    to this one. `previews` has the address of each port.
    """

    sandbox: Sandbox
    runtime: Runtime
    project: ProjectView
    started_s: float
    notice: str = ""
    is_current: bool = True
    paused: bool = False
    loss: SandboxError | None = None
    previews: dict[int, str] = field(default_factory=dict[int, str])
    doors: Door | None = None
    door_channel: DoorChannel = field(init=False)
    ways_out: WaysOut = field(init=False)
    guard: DiskGuard = field(init=False)

    @property
    def dead(self) -> bool:
        return self.runtime.broken and not self.paused

    @property
    def info(self) -> SandboxInfo:
        state: SandboxState = "paused" if self.paused else "running"
        return SandboxInfo(self.sandbox.id, self.sandbox.labels, state)

    def close_doors(self) -> None:
        self.door_channel.close()
        if self.doors:
            self.doors.close()

    @asynccontextmanager
    async def open_door(self, handler: Handler | Way, at: int | str) -> AsyncGenerator[int | str]:
        """Open a door to a handler, or to an open way out, which has a port; see the session."""
        if not isinstance(handler, Way):
            doors = await self.door_channel.open_channel()
            async with doors.listen(handler, at) as place:
                yield place
            return
        door = Door(self.ways_out, handler, self.sandbox.open_channel, self.sandbox.token)
        async with own_tasks() as tasks:
            tasks.start_soon(door.run)
            await door.ready()
            if not handler.port:
                raise door.error or SandboxGone("the sandbox opened no door in time")
            yield handler.port

    async def make_room(self) -> None:
        """Kill what runs if it leaves no process to others, as a fork bomb does."""
        try:
            # For this the runner ends what earlier commands have left.
            await self.runtime.exec(["true"], cwd="/", timeout_s=LATE_S)
        except SandboxError:
            with suppress(SandboxGone):
                for row in await self.runtime.processes.list():
                    with suppress(NotFound):
                        if row.running:
                            await self.runtime.processes.stop(row.id, "KILL")


@dataclass(frozen=True)
class ChatUse:
    """What this server does with a chat now; `starting`: its sandbox is being made.

    `age_s`: how long ago its sandbox was started; `dead`: it was found to have ended. `sandbox`,
    where it is open and not dead, need not be asked for.
    """

    starting: bool = False
    open: bool = False
    paused: bool = False
    calls: int = 0
    dead: bool = False
    age_s: float = 0.0
    background: int = 0
    image: str = ""
    preview: str = ""
    sandbox: SandboxInfo | None = None


def describe_death(ending: Ending, limits: Limits) -> str:
    """Return why a sandbox ended, as a part of a sentence."""
    return _WORDS[ending].format(memory=show_size(limits.memory_mb * MIB))


def explain_limit(result: ExecResult, limits: Mapping[str, str], *, proxied: bool) -> str:
    """Return the limit that a failed command met, by its end and its stderr; "" if none."""
    signs = _LIMITS | (dict.fromkeys(_UNRESOLVED, _PROXIED) if proxied else {})
    ended = "OUT OF MEMORY" if result.out_of_memory else f"{result.signal} EXIT {result.exit_code}"
    said = f"{ended} {result.stderr.lower()}"
    return next((what.format(**limits) for sign, what in signs.items() if sign in said), "")
