"""Whether a service is asked now: one that has failed is left alone for a while."""

import math
import time
from collections.abc import Callable


class CircuitBreaker:
    """Open after a failure, for a pause that doubles with each further one, up to `most_s`.

    `failures`: how many there were in a row. `why` is the last, "" once the service has answered.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic, *, most_s: float) -> None:
        """`now_s`: a steady clock."""
        self._now_s, self._most_s = now_s, most_s
        self.note_answer()

    @property
    def is_open(self) -> bool:
        return self._now_s() < self._until_s

    def note_answer(self) -> None:
        self.failures, self.why, self._until_s = 0, "", -math.inf

    def note_failure(self, why: str, pause_s: float | None = None) -> None:
        """Note a failure, with a `pause_s` of its own if one is given."""
        doubled_s = 2.0 ** min(self.failures, 10)
        self.failures, self.why = self.failures + 1, why
        self._until_s = self._now_s() + (pause_s or min(self._most_s, doubled_s))
