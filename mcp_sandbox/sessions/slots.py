"""So many sandboxes may be open at once, in all and of one user.

The one that nobody has used for longest makes room. When all are in use, who wants one waits in a
queue that is fair between users: the one who was served longest ago is next.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from mcp_sandbox.errors import CapacityReached

# A sandbox may fall free without telling us, when what runs in its background ends.
_LOOK_AGAIN_S = 1.0


class Slot(Protocol):
    """Something of a user's that is open and may be closed while nobody uses it."""

    @property
    def user(self) -> str: ...
    @property
    def is_busy(self) -> bool:
        """A call is under way in it, or it is just being opened or closed."""
        ...

    async def yield_up(self, *, at_once: bool) -> bool:
        """Close it, unless somebody turns out to use it; then False.

        `at_once`: somebody else who is just busy with it is not waited for.
        `release` is called for it before this returns True.
        """
        ...


@dataclass(eq=False)
class _Waiting:
    slot: Slot
    granted: bool = False
    news: anyio.Event = field(default_factory=anyio.Event)


class Slots:
    """Who has one, least recently used first, and who waits for one."""

    def __init__(self, most: int, *, most_per_user: int, wait_s: float) -> None:
        self._most = most
        self._most_per_user = most_per_user
        self._wait_s = wait_s
        self._taken: OrderedDict[Slot, None] = OrderedDict()
        self._queue: list[_Waiting] = []
        # When each user was served last, for users who have a slot or wait for one.
        self._served: dict[str, int] = {}
        self._count = 0
        self._serving = anyio.Lock()

    @property
    def free(self) -> int:
        """How many more may be opened without closing any."""
        return max(0, self._most - len(self._taken) - len(self._queue))

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def taken(self) -> Sequence[Slot]:
        return list(self._taken)

    async def take(self, slot: Slot) -> None:
        """Count `slot` in before it opens; others that nobody uses make room.

        Raises:
            CapacityReached: every open one stayed in use all the time that one may wait.
        """
        waiting = _Waiting(slot)
        self._queue.append(waiting)
        try:
            # The first round is not cut short: without any waiting time it is the only one.
            await self._serve()
            with anyio.move_on_after(self._wait_s):
                while not waiting.granted:
                    with anyio.move_on_after(_LOOK_AGAIN_S):
                        await waiting.news.wait()
                    waiting.news = anyio.Event()
                    # One of those who wait looks for all of them.
                    if not waiting.granted and self._queue[0] is waiting:
                        await self._serve()
            await checkpoint_if_cancelled()
        except BaseException:
            if waiting.granted:
                self.release(slot)
            raise
        finally:
            if not waiting.granted:
                self._queue.remove(waiting)
                self._tell()
        if not waiting.granted:
            raise self._refusal(slot.user)

    def adopt(self, slot: Slot) -> None:
        """Count in what is open already, whatever the limits."""
        self._taken[slot] = None

    def touch(self, slot: Slot) -> None:
        """It was used just now."""
        if slot in self._taken:
            self._taken.move_to_end(slot)

    def rest(self, slot: Slot) -> None:
        """Nobody uses it now: it may make room for who waits."""
        self.touch(slot)
        self._tell()

    def release(self, slot: Slot) -> None:
        """It is closed."""
        self._taken.pop(slot, None)
        self._tell()

    def _tell(self) -> None:
        if self._queue:
            self._queue[0].news.set()

    async def _serve(self) -> None:
        """Grant what can be granted, to whom it is due first."""
        async with self._serving:
            refused: set[str] = set()
            while waiting := self._next(refused):
                if await self._make_room(waiting.slot.user):
                    self._grant(waiting)
                else:
                    refused.add(waiting.slot.user)

    def _next(self, refused: set[str]) -> _Waiting | None:
        """The first of the user who was served longest ago."""
        able = [waiting for waiting in self._queue if waiting.slot.user not in refused]
        return min(able, key=lambda one: self._served.get(one.slot.user, 0), default=None)

    def _grant(self, waiting: _Waiting) -> None:
        # Whoever gave up meanwhile is no longer in the queue.
        if waiting not in self._queue:
            return
        self._queue.remove(waiting)
        self._taken[waiting.slot] = None
        self._count += 1
        present = {slot.user for slot in self._taken} | {one.slot.user for one in self._queue}
        served = {**self._served, waiting.slot.user: self._count}
        self._served = {user: when for user, when in served.items() if user in present}
        waiting.granted = True
        waiting.news.set()

    async def _make_room(self, user: str) -> bool:
        """Whether the user may open one now, after closing what nobody uses if need be."""
        # There may be more than allowed: those that were adopted.
        while self._held(user) >= self._most_per_user:
            if not await self._close_one(user):
                return False
        while len(self._taken) >= self._most:
            if not await self._close_one(None):
                return False
        return True

    async def _close_one(self, user: str | None) -> bool:
        for slot in self.taken():
            if user not in (None, slot.user) or slot.is_busy or slot not in self._taken:
                continue
            if await slot.yield_up(at_once=True):
                return True
        return False

    def _held(self, user: str) -> int:
        return Counter(slot.user for slot in self._taken)[user]

    def _refusal(self, user: str) -> CapacityReached:
        waited = f" and stayed so for {self._wait_s:g} s" if self._wait_s else ""
        if self._held(user) >= self._most_per_user:
            return CapacityReached(
                f"all {self._most_per_user} sandboxes that one user may have open are in "
                f"use{waited}: end a call or a background process in another chat, or set a "
                "higher sessions.max_per_user"
            )
        return CapacityReached(
            f"all {self._most} sandboxes are in use{waited}: try again when a call or a "
            "background process has ended, or set a higher sessions.max_open"
        )
