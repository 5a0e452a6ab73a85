"""That the daemon is to end, why, and how much time is left for what still runs."""

import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import anyio
from anyio.abc import TaskStatus

logger = logging.getLogger(__name__)

Reason = Literal["signal", "shutdown", "idle", "hand-over"]

# Beside the daemon of another version that takes over, the longest calls may finish.
HAND_OVER_S = 3600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """The first reason counts; asking again ends what still runs at once."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.begun = anyio.Event()
        self.urgent = anyio.Event()
        self.claim_released = anyio.Event()

    def begin(self, reason: Reason) -> None:
        if self.reason is None:
            logger.info("the daemon ends: %s", reason)
            self.reason = reason
            self.begun.set()
        elif reason in ("signal", "shutdown"):
            self.urgent.set()

    async def in_time(self, finish: Callable[[float], Awaitable[object]], grace_s: float) -> None:
        """Let calls finish within the seconds that the reason gives them, unless it gets urgent."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hurry, tasks.cancel_scope)
            await finish(HAND_OVER_S if self.reason == "hand-over" else grace_s)
            tasks.cancel_scope.cancel()

    async def _hurry(self, scope: anyio.CancelScope) -> None:
        await self.urgent.wait()
        scope.cancel()


@asynccontextmanager
async def begun_by_signals(ending: Ending) -> AsyncGenerator[None]:
    """Let signals begin the ending while the block runs, and nothing cut short what follows it."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(_watch_signals, ending)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


async def _watch_signals(
    ending: Ending, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(*_SIGNALS) as signals:
        task_status.started()
        async for _ in signals:
            ending.begin("signal")
