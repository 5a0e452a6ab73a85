"""Sandboxes that were started before anybody asked.

Each waits for one new chat; what was a chat's never comes back. Those that die or grow too old
are replaced. A sandbox that somebody waits for goes first: while one is being made, none is
begun for later.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.warming import Warm, Warmer

logger = logging.getLogger(__name__)

_AT_ONCE = 2
# The machine is left to a chat's first call for about as long as such a call takes.
_QUIET_S = 0.25
_BACK_OFF_S = (1.0, 60.0)
# Chats take and free places without telling us.
_LOOK_S = 5.0


class WarmPool:
    """At most `size` warm sandboxes, and none past the places that `free` says there are.

    It works in `tasks`, where the connections of what it has given away are read, too.
    """

    def __init__(
        self,
        warmer: Warmer,
        tasks: TaskGroup,
        *,
        size: int,
        max_age_s: float,
        free: Callable[[], int],
    ) -> None:
        self._warmer = warmer
        self._tasks = tasks
        self._size = size if warmer.usable else 0
        self._max_age_s = max_age_s
        self._free = free
        # Oldest first; cancelling the scope ends the wait for its death or old age.
        self._idle: dict[Warm, anyio.CancelScope] = {}
        # Given to chats; what they leave in the pool is removed when nobody waits.
        self._given: list[Warm] = []
        self._starting = self._leaving = self._foreground = 0
        self._hits = self._misses = 0
        self._failures = 0
        self._not_before = 0.0
        self._changed = anyio.Event()
        self._running = anyio.CancelScope()
        self._ended: anyio.Event | None = None

    def statistics(self) -> dict[str, int]:
        """How many there are (`busy`: being made, given to a chat or removed), and how it went."""
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
        """Begin to fill it."""
        if self._size:
            self._ended = anyio.Event()
            self._tasks.start_soon(self._run, self._ended)

    async def stop(self) -> None:
        """End what waits; what chats have got is theirs."""
        self._running.cancel()
        if self._ended:
            await self._ended.wait()

    @contextmanager
    def foreground(self) -> Generator[None]:
        """Somebody waits for a sandbox: until it is there, none is begun for later."""
        self._foreground += 1
        try:
            yield
        finally:
            self._foreground -= 1
            self._put_off(_QUIET_S)

    async def adopt(self, chat: ChatId) -> tuple[Sandbox, Runtime] | None:
        """A warm sandbox that is the new chat's from now on; None when there is none for it.

        Whoever calls has the chat's lock. Should it have files after all, they stay as they are.
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

    async def _give(self, warm: Warm, chat: ChatId) -> tuple[Sandbox, Runtime] | None:
        try:
            await self._warmer.adopt(warm, chat)
        except BaseException as exc:
            self._misses += 1
            await self._warmer.drop(warm)
            if not isinstance(exc, SandboxError):
                raise
            logger.warning("chat %s gets no warm sandbox: %s", chat, exc)
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
                await self._warmer.aclose()
            ended.set()

    async def _supply(self, places: TaskGroup) -> None:
        """Keep the pool as full as it should be, for ever."""
        while not await self._opened():
            await self._next_change()
        while True:
            while self._given and self._may_begin():
                await self._warmer.forget(self._given.pop())
            room = min(self._size, self._free())
            for scope in list(self._idle.values())[: max(0, len(self._idle) - room)]:
                scope.cancel()
            for _ in range(self._due(room)):
                self._starting += 1
                places.start_soon(self._occupy)
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait until something is different, or may be without anybody telling."""
        wait_s = self._not_before - anyio.current_time()
        self._changed = anyio.Event()
        with anyio.move_on_after(wait_s if 0 < wait_s < _LOOK_S else _LOOK_S):
            await self._changed.wait()

    async def _opened(self) -> bool:
        if not self._may_begin():
            return False
        try:
            await self._warmer.open()
        except SandboxError as exc:
            self._note_failure(exc)
            return False
        return True

    def _may_begin(self) -> bool:
        return not self._foreground and anyio.current_time() >= self._not_before

    def _due(self, room: int) -> int:
        """How many to begin now."""
        if not self._may_begin():
            return 0
        missing = room - len(self._idle) - self._starting
        return max(0, min(missing, _AT_ONCE - self._starting))

    async def _occupy(self) -> None:
        """One place of the pool: a sandbox from its start until it is given away or removed."""
        try:
            warm = await self._warmer.make(self._tasks)
        except SandboxError as exc:
            self._note_failure(exc)
            return
        finally:
            self._starting -= 1
            self._changed.set()
        self._failures = 0
        try:
            with anyio.move_on_after(self._max_age_s) as self._idle[warm]:
                await self._warmer.stay_with(warm)
        finally:
            if self._idle.pop(warm, None):
                with self._leave():
                    await self._warmer.drop(warm)

    def _note_failure(self, exc: SandboxError) -> None:
        least, most = _BACK_OFF_S
        pause_s = min(most, least * 2**self._failures)
        self._failures += 1
        self._put_off(pause_s)
        logger.warning("no sandbox could be warmed up; again in %g s: %s", pause_s, exc)

    def _put_off(self, pause_s: float) -> None:
        self._not_before = max(self._not_before, anyio.current_time() + pause_s)
        self._changed.set()
