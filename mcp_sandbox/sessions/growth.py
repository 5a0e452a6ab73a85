"""Holds a chat to its limits on disk while its sandbox is open, also between calls."""

import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext

import anyio

from mcp_sandbox.errors import OperatorError, SandboxError, StorageUnavailable, WorkspaceFull
from mcp_sandbox.models import ExecResult
from mcp_sandbox.workspace.meter import Meter

logger = logging.getLogger(__name__)

# What goes on in the background between calls is looked at this often, at the most.
_BETWEEN_CALLS_S = 0.5
_TRY_AGAIN_S = 10.0
# A cancelled call is over when all it started is dead.
_ENDING_S = 10.0
# What the kernel's refusals are called, and what is behind them.
_FILE = "one file passed the limit on its size ({file_size}): write several"
_LIMITS = {
    "file too large": _FILE,
    "file size limit exceeded": _FILE,
    "no space left on device": "/tmp ({tmp}) and /dev/shm ({shm}) are small: use /workspace",  # noqa: S108
}


class GrowthGuard:
    """Ends the calls under way when the chat grows over a limit.

    When it grows though there was no call, something in the background writes: then its sandbox is
    ended.
    """

    def __init__(self, meter: Meter, end_sandbox: Callable[[], Awaitable[object]]) -> None:
        self._meter = meter
        self._end_sandbox = end_sandbox
        self._calls: set[anyio.CancelScope] = set()
        self._called = anyio.Event()
        self._left = anyio.Event()
        self._count = 0
        self._pauses = 0
        self._ended_calls = False
        self._watching = anyio.CancelScope()
        self.problem: SandboxError = WorkspaceFull("the workspace is full")

    @contextmanager
    def call(self, *, may_end: bool = True, answers: bool = False) -> Generator[anyio.CancelScope]:
        """A call that may write; unless it `may_end`, what was written before does not end it.

        With `answers` the caller enters the scope, and has a result even when it is cancelled.

        Raises:
            WorkspaceFull, StorageUnavailable: it was ended because a limit was passed.
        """
        scope = anyio.CancelScope()
        if may_end:
            self._calls.add(scope)
        self._count += 1
        self._called.set()
        try:
            with nullcontext() if answers else scope:
                yield scope
        finally:
            self._calls.discard(scope)
            self._left.set()
            self._left = anyio.Event()
        if scope.cancelled_caught and not answers:
            raise type(self.problem)(f"the call was ended: {self.problem}")

    async def run(self) -> None:
        """Watch until `stop`."""
        with self._watching:
            while True:
                calls_before, quiet, self._pauses = self._count, not self._calls, 0
                try:
                    found = await self._meter.wait_for_overshoot(self._pause)
                except StorageUnavailable:
                    logger.exception("the workspace cannot be measured: its limit does not hold")
                    await anyio.sleep(_TRY_AGAIN_S)
                    continue
                background = self._ended_calls or (quiet and self._count == calls_before)
                # A disk that somebody else fills up is no reason to end what runs quietly here.
                if background and isinstance(found, WorkspaceFull):
                    logger.warning("ending a sandbox for what its background writes: %s", found)
                    await self._end_background()
                await self._end_calls(found)

    def stop(self) -> None:
        self._watching.cancel()

    async def _pause(self, least_s: float) -> None:
        if self._pauses:
            # The reading after the last pause was in order.
            self._ended_calls = False
        self._pauses += 1
        if not self._calls:
            self._called = anyio.Event()
            with anyio.move_on_after(_BETWEEN_CALLS_S):
                await self._called.wait()
        await anyio.sleep(least_s)

    async def _end_background(self) -> None:
        try:
            await self._end_sandbox()
        except OperatorError:
            # Nobody waits for this task, and its failure would end every other chat's.
            logger.exception("it could not be ended; trying again when it goes on writing")
            await anyio.sleep(_TRY_AGAIN_S)

    async def _end_calls(self, found: SandboxError) -> None:
        """What was written is not undone, but what starts from now on cannot write more.

        So if files still grow when these calls are dead, it is neither theirs nor the next ones'.
        """
        self.problem = found
        self._ended_calls = bool(self._calls)
        ending = list(self._calls)
        for scope in ending:
            scope.cancel()
        with anyio.move_on_after(_ENDING_S):
            while self._calls.intersection(ending):
                await self._left.wait()


def limit_met(result: ExecResult, limits: Mapping[str, str]) -> str:
    """Which limit on sizes a command that failed ran into, by its end and its words; or none."""
    # With this code a shell says that the signal ended a program.
    ended = {"SIGXFSZ", 153} & {result.signal, result.exit_code}
    said = "file too large" if ended else result.stderr.lower()
    return next((what.format(**limits) for sign, what in _LIMITS.items() if sign in said), "")
