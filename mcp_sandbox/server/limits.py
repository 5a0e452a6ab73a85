"""How much one user may ask for over HTTP. Counts only; the time is given to it."""

import math
from collections import Counter
from dataclasses import dataclass

_BURST_S = 10.0
# Parsing this much takes about as long as serving a small request.
_BYTES_A_REQUEST = 64 << 10


class Rate:
    """So many requests a second for each user, counted over ten seconds."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._most = per_second * _BURST_S
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, user: str, now: float) -> int:
        """Count a request; returns 0, or after how many seconds it may come again."""
        left, when = self._left.get(user, (self._most, now))
        left = min(self._most, left + (now - when) * self._per_second)
        if left < 1:
            self._left[user] = left, now
            return max(1, math.ceil((1 - left) / self._per_second))
        self._left[user] = left - 1, now
        return 0

    def charge(self, user: str, size: int) -> None:
        """Count a message that was taken as more requests, for its bytes; what comes next waits.

        One message costs at most what may come in ten seconds.
        """
        left, when = self._left[user]
        self._left[user] = left - min(self._most, size // _BYTES_A_REQUEST), when


class AtOnce:
    """So many requests at the same time for each user."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = Counter[str]()

    def enter(self, user: str) -> bool:
        """Count a request in, if there is room."""
        if self._open[user] >= self._limit:
            return False
        self._open[user] += 1
        return True

    def leave(self, user: str) -> None:
        """Count a request out again."""
        self._open[user] -= 1
        if not self._open[user]:
            del self._open[user]


class Bytes:
    """So many bytes of messages at the same time for each user."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = Counter[str]()

    def add(self, user: str, count: int) -> bool:
        """Count bytes in, if there is room."""
        if self._held[user] + count > self._limit:
            return False
        self._held[user] += count
        return True

    def remove(self, user: str, count: int) -> None:
        """Count bytes out again."""
        self._held[user] -= count
        if not self._held[user]:
            del self._held[user]


@dataclass(eq=False)
class HeldSession:
    """A session of a client of the older protocol, as far as it counts."""

    user: str
    requests: int = 0
    last_used: float = 0.0


class Sessions:
    """So many sessions for each user. The transport ends an idle one after `idle_s`, so do we."""

    def __init__(self, limit: int, idle_s: float) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._named: dict[str, HeldSession] = {}
        self._opening: set[HeldSession] = set()

    def begin(self, user: str, session_id: str | None, now: float) -> HeldSession | None:
        """Count a request of a session in; without an id it opens one. None: there is no room."""
        if session_id is not None:
            held = self._of(user, session_id) or HeldSession(user)
        elif self._count(user, now) < self._limit:
            held = HeldSession(user)
            self._opening.add(held)
        else:
            return None
        held.requests += 1
        return held

    def end(self, held: HeldSession, now: float, opened_id: str | None = None) -> None:
        """Count a request out again; `opened_id` is the id of the session that it opened."""
        held.requests -= 1
        held.last_used = now
        if held in self._opening:
            self._opening.discard(held)
            if opened_id is not None:
                self._named[opened_id] = held

    def forget(self, user: str, session_id: str) -> None:
        """The session of that user has ended."""
        if self._of(user, session_id) is not None:
            del self._named[session_id]

    def _of(self, user: str, session_id: str) -> HeldSession | None:
        held = self._named.get(session_id)
        return held if held is not None and held.user == user else None

    def _count(self, user: str, now: float) -> int:
        for session_id, held in [*self._named.items()]:
            if not held.requests and now - held.last_used > self._idle_s:
                del self._named[session_id]
        return sum(held.user == user for held in (*self._named.values(), *self._opening))
