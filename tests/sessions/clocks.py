"""A clock that a test sets."""

from mcp_sandbox.workspace.retention import Moment

NOON = 1_700_000_000.0


class SetClock:
    """Time passes, and the wall clock jumps, when the test says so."""

    def __init__(self) -> None:
        self._now = Moment(NOON, 5_000.0)

    def __call__(self) -> Moment:
        return self._now

    def pass_(self, seconds: float) -> None:
        self._now = Moment(self._now.wall_s + seconds, self._now.steady_s + seconds)

    def jump(self, seconds: float) -> None:
        self._now = Moment(self._now.wall_s + seconds, self._now.steady_s)
