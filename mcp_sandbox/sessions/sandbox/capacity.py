"""Limits how many sandboxes are open at once, in all and of one user.

The least recently used one is closed to make room. When all are in use, a call waits in a queue
that is fair between users: the user who was served longest ago is next. Nothing is locked while a
sandbox is being closed: a free slot is given at once.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from mcp_sandbox.errors import CapacityReached

if TYPE_CHECKING:
    from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox

# No event tells when a background process ends, and its sandbox can be closed.
_LOOK_AGAIN_S = 1.0


@dataclass(eq=False)
class _Waiting:
    sandbox: "ChatSandbox"
    granted: bool = False
    changed: anyio.Event = field(default_factory=anyio.Event)


class Capacity:
    """The chats' sandboxes that have a slot, least recently used first, and those that wait."""

    def __init__(self, most: int, *, most_per_user: int, wait_s: float) -> None:
        self._most = most
        self._most_per_user = most_per_user
        self._wait_s = wait_s
        self._taken: OrderedDict[ChatSandbox, None] = OrderedDict()
        self._queue: list[_Waiting] = []
        self._closing: set[ChatSandbox] = set()
        # When each user was served last, for users who have a slot or wait for one.
        self._served: dict[str, int] = {}
        self._count = 0

    @property
    def free(self) -> int:
        """How many more may be opened without closing any."""
        return max(0, self._most - len(self._taken) - len(self._queue))

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def list_taken(self) -> Sequence["ChatSandbox"]:
        return list(self._taken)

    async def take(self, sandbox: "ChatSandbox") -> None:
        """Take a slot for `sandbox` before it opens; others that are not in use are closed for it.

        Raises:
            CapacityReached: every open sandbox stayed in use for the longest time of waiting.
        """
        waiting = _Waiting(sandbox)
        self._queue.append(waiting)
        try:
            self._serve()
            # The first round is not cut short: without any waiting time it is the only one.
            await self._make_room(waiting)
            with anyio.move_on_after(self._wait_s):
                while not waiting.granted:
                    with anyio.move_on_after(_LOOK_AGAIN_S):
                        await waiting.changed.wait()
                    waiting.changed = anyio.Event()
                    # The first call in the queue of each user makes room for all of them.
                    if self._is_first(waiting):
                        await self._make_room(waiting)
            await checkpoint_if_cancelled()
        except BaseException:
            if waiting.granted:
                self.release(sandbox)
            raise
        finally:
            if not waiting.granted:
                self._queue.remove(waiting)
                self._serve()
        if not waiting.granted:
            raise self._refusal(sandbox.user)

    def adopt(self, sandbox: "ChatSandbox") -> None:
        """Give a slot to a sandbox that is open already, whatever the limits."""
        self._taken[sandbox] = None

    def mark_used(self, sandbox: "ChatSandbox") -> None:
        """Note that it is used now."""
        if sandbox in self._taken:
            self._taken.move_to_end(sandbox)

    def mark_idle(self, sandbox: "ChatSandbox") -> None:
        """Note that it is not in use any more, and may be closed to make room."""
        self.mark_used(sandbox)
        for waiting in self._queue:
            if self._is_first(waiting):
                waiting.changed.set()

    def release(self, sandbox: "ChatSandbox") -> None:
        """Free the slot of a closed sandbox."""
        self._taken.pop(sandbox, None)
        self._serve()

    def _serve(self) -> None:
        """Grant the free slots, first to the user who was served longest ago."""
        while able := [one for one in self._queue if self._has_place(one.sandbox.user)]:
            self._grant(min(able, key=lambda one: self._served.get(one.sandbox.user, 0)))

    def _has_place(self, user: str) -> bool:
        return len(self._taken) < self._most and not self._at_limit(user)

    def _at_limit(self, user: str) -> bool:
        # There may be more than allowed: those that were adopted.
        return Counter(sandbox.user for sandbox in self._taken)[user] >= self._most_per_user

    def _is_first(self, waiting: _Waiting) -> bool:
        of_user = (one for one in self._queue if one.sandbox.user == waiting.sandbox.user)
        return next(of_user, None) is waiting

    def _grant(self, waiting: _Waiting) -> None:
        self._queue.remove(waiting)
        self._taken[waiting.sandbox] = None
        self._count += 1
        present = {sandbox.user for sandbox in self._taken} | {
            one.sandbox.user for one in self._queue
        }
        served = {**self._served, waiting.sandbox.user: self._count}
        self._served = {user: when for user, when in served.items() if user in present}
        waiting.granted = True
        waiting.changed.set()

    async def _make_room(self, waiting: _Waiting) -> None:
        """Close sandboxes that are not in use, one after the other, until a slot is granted."""
        for sandbox in self.list_taken():
            if waiting.granted:
                return
            if self._may_close(sandbox, waiting.sandbox.user):
                self._closing.add(sandbox)
                try:
                    await sandbox.release_if_idle(at_once=True)
                finally:
                    self._closing.discard(sandbox)

    def _may_close(self, sandbox: "ChatSandbox", user: str) -> bool:
        if sandbox.is_busy or sandbox in self._closing or sandbox not in self._taken:
            return False
        return sandbox.user == user or not self._at_limit(user)

    def _refusal(self, user: str) -> CapacityReached:
        waited = f" and stayed so for {self._wait_s:g} s" if self._wait_s else ""
        if self._at_limit(user):
            return CapacityReached(
                f"all {self._most_per_user} sandboxes that one user may have open are in "
                f"use{waited}: end a call or a background process in another chat, or set a "
                "higher sessions.max_per_user"
            )
        return CapacityReached(
            f"all {self._most} sandboxes are in use{waited}: try again when a call or a "
            "background process has ended, or set a higher sessions.max_open"
        )
