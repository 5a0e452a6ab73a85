"""A time limit that also ends what does not look at the clock, such as a costly pattern."""

from __future__ import annotations

import signal
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class TimeUp(BaseException):
    """The time limit is reached. No error: whoever sets a limit also catches this."""


def _ring(_signum: int, _frame: FrameType | None) -> None:
    raise TimeUp


class TimeLimit:
    """Raises TimeUp inside its `with` block when that takes longer. For the main thread only."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._started = monotonic()
        self._before = signal.signal(signal.SIGALRM, _ring)
        self._left, self._every = signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        """Give the timer back to whoever used it before."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        if self._left:
            rest = max(self._left - (monotonic() - self._started), 0.001)
            signal.setitimer(signal.ITIMER_REAL, rest, self._every)
