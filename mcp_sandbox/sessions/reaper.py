"""One loop that looks after what is open: writes down its use, and ends what nobody uses.

It never ends what somebody uses: the hold asks the runner, which knows of every server.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

import anyio

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sessions.cleaning import Cleaning
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.listing import Use
from mcp_sandbox.sessions.settings import Lifetimes
from mcp_sandbox.workspace.retention import WATCHED_S, Moment, is_time

logger = logging.getLogger(__name__)

Step = Literal["bury", "expire", "remove", "pause"]

_LOOK_S = 15.0
_LOOK_LEAST_S = 0.5
_FILES_S = 30.0
_TIDY_S = 3600.0


def next_step(use: Use, idle_s: float, lifetimes: Lifetimes) -> Step | None:
    """What is to be done with an open sandbox that this server has not used for `idle_s`."""
    if use.starting or use.calls:
        return None
    if use.dead:
        return "bury"
    if use.age_s >= lifetimes.lifetime_s:
        return "expire"
    if idle_s >= lifetimes.remove_after_s:
        return "remove"
    quiet = use.can_pause and not use.background
    return "pause" if quiet and idle_s >= lifetimes.pause_after_s else None


class Reaper:
    """Looks after the open sandboxes and the old files of one data root."""

    def __init__(
        self,
        open_ones: Callable[[], Sequence[Hold]],
        ledger: Ledger,
        cleaning: Cleaning,
        lifetimes: Lifetimes,
    ) -> None:
        self._open_ones = open_ones
        self._ledger = ledger
        self._cleaning = cleaning
        self._lifetimes = lifetimes
        self._files = _FilesTimetable(ledger.clock(), lifetimes.cleanup)
        shortest = min(lifetimes.pause_after_s, lifetimes.remove_after_s, lifetimes.lifetime_s)
        self._interval_s = min(_LOOK_S, max(_LOOK_LEAST_S, shortest / 4))

    async def run(self) -> None:
        """Look until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_files)
            while True:
                await self.look()
                with anyio.move_on_after(self._interval_s):
                    await self._ledger.news()

    async def look(self) -> None:
        """Do for the sandboxes what is to be done now, and write down what happened."""
        async with anyio.create_task_group() as tasks:
            # One whose engine does not answer holds up none of the others.
            for kept in self._open_ones():
                tasks.start_soon(self._care, kept)
        await self._ledger.write()

    async def look_at_files(self) -> None:
        """Do for old files what is to be done now; this may take long."""
        turn = self._files.turn(self._ledger.clock())
        try:
            if turn == "collect":
                await self._cleaning.collect(watched_s=WATCHED_S)
            elif turn == "tidy":
                await self._cleaning.tidy(watched_s=WATCHED_S)
        except SandboxError:
            logger.exception("old files could not be looked at; trying again later")

    async def _run_files(self) -> None:
        while True:
            # Not at once: the first call comes first.
            await anyio.sleep(_FILES_S)
            await self.look_at_files()

    async def _care(self, kept: Hold) -> None:
        use = kept.use()
        if use.calls or use.background:
            self._ledger.used(kept.chat)
        try:
            match next_step(use, self._ledger.idle_s(kept.chat), self._lifetimes):
                case "bury" | "remove":
                    if not await kept.yield_up():
                        self._ledger.used(kept.chat)
                case "expire":
                    await kept.yield_up(background_too=True)
                case "pause":
                    await kept.pause()
                case None:
                    pass
        except SandboxError:
            logger.exception("chat %s: its sandbox could not be looked after", kept.chat)


class _FilesTimetable:
    """When to look at files: at first, every hour, and on schedule.

    What is due by the schedule is also removed once soon after the start: many a server does not
    live until its hour.
    """

    def __init__(self, now: Moment, schedule: str) -> None:
        self._schedule = schedule
        self._begun_s = now.steady_s
        self._tidied_s: float | None = None
        self._collected: datetime | None = None

    def turn(self, now: Moment) -> Literal["collect", "tidy"] | None:
        local = datetime.fromtimestamp(now.wall_s)
        if self._collected is None:
            first = now.steady_s - self._begun_s >= WATCHED_S
        else:
            # After the clock was put back, its next turn is the next by the new time.
            self._collected = min(self._collected, local)
            first = is_time(self._schedule, self._collected, local)
        if first:
            self._collected, self._tidied_s = local, now.steady_s
            return "collect"
        if self._tidied_s is None or now.steady_s - self._tidied_s >= _TIDY_S:
            self._tidied_s = now.steady_s
            return "tidy"
        return None
