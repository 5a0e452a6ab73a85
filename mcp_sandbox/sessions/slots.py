"""So many sandboxes may be open at once; the one that nobody has used for longest makes room."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import anyio

from mcp_sandbox.errors import CapacityReached


class Slot(Protocol):
    """Something open that can be closed while it is not busy."""

    @property
    def is_busy(self) -> bool: ...
    async def close(self) -> None: ...


class Slots:
    """Least recently used first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: OrderedDict[Slot, None] = OrderedDict()
        self._lock = anyio.Lock()

    async def take(self, slot: Slot) -> None:
        """Count `slot` in before it opens; close others that are not in use to make room.

        Raises:
            CapacityReached: every open one is in use.
        """
        async with self._lock:
            while len(self._taken) >= self._most:
                await self._idle_one().close()
            self._taken[slot] = None

    def _idle_one(self) -> Slot:
        for slot in self._taken:
            if not slot.is_busy:
                return slot
        raise CapacityReached(
            f"all {self._most} sandboxes are in use: wait for a call to end, or set a higher "
            "sessions.max_open"
        )

    def touch(self, slot: Slot) -> None:
        """It was used just now."""
        if slot in self._taken:
            self._taken.move_to_end(slot)

    def release(self, slot: Slot) -> None:
        self._taken.pop(slot, None)

    def taken(self) -> Sequence[Slot]:
        return list(self._taken)
