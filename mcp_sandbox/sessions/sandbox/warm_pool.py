"""Sandboxes that are started before a chat asks for one.

Each waits for one new chat, and never returns to the pool. Those that die or grow too old are
replaced. A sandbox that a call waits for goes first: while one is being made, none is begun for
later.

Whenever this process is killed, there is either a sandbox that its label ("pool") and its trees
in the pool mark as unused, or a chat with its files. The order of an adoption sees to that:

    label it as the chat's -> home becomes the chat's -> workspace becomes the chat's -> use it
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Pooled, Sandbox
from mcp_sandbox.errors import OperatorError, SandboxError, SandboxGone
from mcp_sandbox.models import ChatId, SandboxId, SandboxSpec
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.settings import SPEC, SessionSettings
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.workspace.directory import ChatDirectories
from mcp_sandbox.workspace.pool import PoolFolder, WarmTrees

logger = logging.getLogger(__name__)

_LABEL = "pool"
_LOOK_AFTER_S = 10.0
_ANSWER_S = 1.0
# An engine takes some seconds to end a sandbox; a stuck one is not waited for any longer.
_DROP_S = 20.0
_AT_ONCE = 2
# The machine is left to a chat's first call for about as long as such a call takes.
_QUIET_S = 0.25
_BACK_OFF_S = (1.0, 60.0)
# No event tells when a chat takes or frees a slot.
_LOOK_S = 5.0


@dataclass(frozen=True, eq=False)
class WarmSandbox:
    """A sandbox in which nothing has run yet, with the connection to its runner."""

    sandbox: Sandbox
    runtime: Runtime
    trees: WarmTrees


class WarmPool:
    """At most `pool_size` warm sandboxes, and no more than `free` returns slots.

    Its tasks run in `tasks`, and those that read the connections of adopted sandboxes, too.
    """

    def __init__(
        self,
        backend: Pooled,
        folder: PoolFolder,
        settings: SessionSettings,
        tasks: TaskGroup,
        *,
        free: Callable[[], int],
        look_after_s: float = _LOOK_AFTER_S,
    ) -> None:
        """`look_after_s`: how often each is checked."""
        self._backend = backend
        self._folder = folder
        self._settings = settings
        self._tasks = tasks
        # None where a mount names the chat: a sandbox cannot be made before its chat is known.
        self._size = settings.pool_size if folder.usable else 0
        self._free = free
        self._look_after_s = look_after_s
        # Oldest first; cancelling the scope ends the wait for its death or old age.
        self._idle: dict[WarmSandbox, anyio.CancelScope] = {}
        # Adopted by chats; their remains in the pool are removed when no call waits.
        self._given: list[WarmSandbox] = []
        self._starting = self._leaving = self._foreground = 0
        self._hits = self._misses = 0
        self._failures = 0
        self._not_before = 0.0
        self._changed = anyio.Event()
        self._running = anyio.CancelScope()
        self._ended: anyio.Event | None = None

    def statistics(self) -> dict[str, int]:
        """Return how many there are (`busy`: being made, adopted or removed), hits and misses."""
        busy = self._starting + self._leaving
        return {
            "total": busy + len(self._idle),
            "busy": busy,
            "idle": len(self._idle),
            "max": self._size,
            "hits": self._hits,
            "misses": self._misses,
        }

    def start(self) -> None:
        """Begin to fill the pool."""
        if self._size:
            self._ended = anyio.Event()
            self._tasks.start_soon(self._run, self._ended)

    async def stop(self) -> None:
        """End the waiting sandboxes; adopted ones stay."""
        self._running.cancel()
        if self._ended:
            await self._ended.wait()

    @contextmanager
    def foreground(self) -> Generator[None]:
        """Begin no sandbox for later while the block makes one that a call waits for."""
        self._foreground += 1
        try:
            yield
        finally:
            self._foreground -= 1
            self._put_off(_QUIET_S)

    async def adopt(self, chat: ChatId) -> tuple[Sandbox, Runtime] | None:
        """Give a warm sandbox to a new chat; return None if there is none for it.

        The caller has the chat's lock. Files that the chat has after all are left as they are.
        """
        if not self._size:
            return None
        if not self._idle:
            self._misses += 1
            return None
        warm = next(iter(self._idle))
        self._idle.pop(warm).cancel()
        with self.foreground(), self._leave():
            return await self._give(warm, chat)

    @contextmanager
    def _leave(self) -> Generator[None]:
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1
            self._changed.set()

    async def _give(self, warm: WarmSandbox, chat: ChatId) -> tuple[Sandbox, Runtime] | None:
        try:
            labels = {**warm.sandbox.labels, "user": chat.user, "chat": chat.chat}
            await self._backend.relabel(warm.sandbox.id, labels)
            await self._folder.adopt(warm.trees, chat)
        except BaseException as exc:
            self._misses += 1
            await self._drop(warm)
            if not isinstance(exc, SandboxError):
                raise
            logger.warning("chat %s gets no warm sandbox, but a new one: %s", chat, exc)
            return None
        self._hits += 1
        self._given.append(warm)
        return warm.sandbox, warm.runtime

    async def _run(self, ended: anyio.Event) -> None:
        try:
            with self._running:
                async with anyio.create_task_group() as places:
                    await self._supply(places)
        finally:
            with anyio.CancelScope(shield=True):
                while self._leaving:
                    await self._next_change()
                try:
                    await self._folder.aclose()
                except OperatorError:
                    logger.exception("this server's part of the pool stays for the next to remove")
            ended.set()

    async def _supply(self, places: TaskGroup) -> None:
        is_open = False
        while not is_open:
            try:
                if self._may_begin():
                    await self._end_abandoned()
                    await self._folder.open()
                    is_open = True
            except SandboxError as exc:
                self._note_failure(exc)
            if not is_open:
                await self._next_change()
        while True:
            while self._given and self._may_begin():
                given = self._given.pop()
                try:
                    await self._folder.discard(given.trees)
                except SandboxError:
                    logger.exception("cannot remove %s from the pool", given.trees.label)
            room = min(self._size, self._free())
            for scope in list(self._idle.values())[: max(0, len(self._idle) - room)]:
                scope.cancel()
            missing = room - len(self._idle) - self._starting
            due = min(missing, _AT_ONCE - self._starting) if self._may_begin() else 0
            for _ in range(due):
                self._starting += 1
                places.start_soon(self._occupy)
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait for a change, or for the time when one may have come without an event."""
        wait_s = self._not_before - anyio.current_time()
        self._changed = anyio.Event()
        with anyio.move_on_after(wait_s if 0 < wait_s < _LOOK_S else _LOOK_S):
            await self._changed.wait()

    def _may_begin(self) -> bool:
        return not self._foreground and anyio.current_time() >= self._not_before

    async def _occupy(self) -> None:
        try:
            warm = await self._make()
        except SandboxError as exc:
            self._note_failure(exc)
            return
        finally:
            self._starting -= 1
            self._changed.set()
        self._failures = 0
        event(logger, "warm sandbox started", sandbox=warm.sandbox.id)
        try:
            with anyio.move_on_after(self._settings.pool_max_age_s) as self._idle[warm]:
                await self._stay_with(warm)
        finally:
            if self._idle.pop(warm, None):
                with self._leave():
                    await self._drop(warm)

    def _note_failure(self, exc: SandboxError) -> None:
        least, most = _BACK_OFF_S
        pause_s = min(most, least * 2**self._failures)
        self._failures += 1
        self._put_off(pause_s)
        logger.warning("no sandbox could be started early; trying again in %g s: %s", pause_s, exc)

    def _put_off(self, pause_s: float) -> None:
        self._not_before = max(self._not_before, anyio.current_time() + pause_s)
        self._changed.set()

    async def _end_abandoned(self) -> None:
        # In this order: a process that is dead afterwards starts none after the listing.
        running = await self._backend.running()
        dead = await to_thread.run_sync(self._folder.abandoned)
        for info in running:
            label = info.labels.get(_LABEL, "")
            left = label.partition("/")[0] in dead
            if left and await to_thread.run_sync(self._folder.keeps, label):
                await self._backend.destroy(info.id)
                logger.info("removed warm sandbox %s: its server is gone", info.id)
        for process in dead:
            await to_thread.run_sync(self._folder.remove, process)

    async def _make(self) -> WarmSandbox:
        trees = await self._folder.prepare()
        try:
            sandbox = await self._backend.create(await self._spec(trees))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._folder.discard(trees)
            raise
        try:
            trees = await self._folder.settle(trees)
            runtime = await connect(sandbox, trees.directories, self._tasks, self._settings)
        except BaseException:
            await self._remove(sandbox.id, trees)
            raise
        return WarmSandbox(sandbox, runtime, trees)

    async def _spec(self, trees: WarmTrees) -> SandboxSpec:
        labels, origin = {_LABEL: trees.label}, await self._backend.origin()
        return self._settings.spec(trees.directories, labels, origin)

    async def _stay_with(self, warm: WarmSandbox) -> None:
        """Return when it is unusable: it has ended, is stuck, or would be made otherwise now."""
        while not warm.runtime.broken:
            with anyio.move_on_after(self._look_after_s):
                await warm.runtime.wait_broken()
            try:
                await warm.runtime.status(timeout_s=_ANSWER_S)
                wanted = (await self._spec(warm.trees)).labels[SPEC]
            except (SandboxGone, OperatorError) as exc:
                logger.warning("warm sandbox %s is removed: %s", warm.sandbox.id, exc)
                return
            if warm.sandbox.labels.get(SPEC) != wanted:
                logger.info("warm sandbox %s is outdated: the image has changed", warm.sandbox.id)
                return

    async def _drop(self, warm: WarmSandbox) -> None:
        with anyio.move_on_after(_DROP_S, shield=True):
            await warm.runtime.aclose()
        await self._remove(warm.sandbox.id, warm.trees)

    async def _remove(self, sandbox_id: SandboxId, trees: WarmTrees) -> None:
        with anyio.move_on_after(_DROP_S, shield=True) as limit:
            try:
                await self._backend.destroy(sandbox_id)
                await self._folder.discard(trees)
            except OperatorError:
                # It ends itself without a connection; its trees go with this process's folder.
                logger.exception("warm sandbox %s could not be removed", sandbox_id)
            else:
                event(logger, "warm sandbox ended", sandbox=sandbox_id)
        if limit.cancelled_caught:
            logger.error("warm sandbox %s could not be removed in time", sandbox_id)


async def connect(
    sandbox: Sandbox, directories: ChatDirectories, tasks: TaskGroup, settings: SessionSettings
) -> Runtime:
    """Open a connection that is read in `tasks`; check that the sandbox has these directories.

    Raises:
        SandboxGone: the runner cannot be reached, or its workspace is another directory.
    """
    channel = Channel(await sandbox.open_channel(), sandbox.token)
    await channel.open(tasks)
    runtime = Runtime(channel, keep_bytes=settings.keep_bytes)
    if not directories.mounted:
        return runtime
    try:
        # The mount must show the chat's own directory, not what took its place meanwhile.
        is_own = runtime.hello.workspace_inode == directories.workspace_inode
        if not is_own:
            found = await to_thread.run_sync(directories.workspace.lstat)
            is_own = runtime.hello.workspace_changed_ns == found.st_ctime_ns
    except BaseException:
        await runtime.aclose()
        raise
    if not is_own:
        await runtime.aclose()
        raise SandboxGone("the sandbox came up without this chat's workspace; try again")
    return runtime
