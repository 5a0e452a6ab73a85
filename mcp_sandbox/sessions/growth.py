"""Holds a chat to its limits on disk while its sandbox is open, also between calls."""

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import anyio

from mcp_sandbox.errors import SandboxError, StorageUnavailable, WorkspaceFull
from mcp_sandbox.workspace.meter import Meter

logger = logging.getLogger(__name__)

# What goes on in the background between calls is looked at this often.
_BETWEEN_CALLS_S = 2.0
_TRY_AGAIN_S = 10.0


class GrowthGuard:
    """Ends the calls under way when the chat grows over a limit; if there are none, its sandbox."""

    def __init__(self, meter: Meter, end_sandbox: Callable[[], Awaitable[None]]) -> None:
        self._meter = meter
        self._end_sandbox = end_sandbox
        self._calls: set[anyio.CancelScope] = set()
        self._called = anyio.Event()
        self._watching = anyio.CancelScope()
        self._problem: SandboxError | None = None

    @contextmanager
    def call(self) -> Generator[None]:
        """A call that may write.

        Raises:
            WorkspaceFull, StorageUnavailable: it was ended because a limit was passed.
        """
        scope = anyio.CancelScope()
        self._calls.add(scope)
        self._called.set()
        try:
            with scope:
                yield
        finally:
            self._calls.discard(scope)
            self._meter.note_change()
        if scope.cancelled_caught:
            raise self._problem or WorkspaceFull("the call was ended: the workspace is full")

    async def run(self) -> None:
        """Watch until `stop`."""
        with self._watching:
            while True:
                try:
                    await self._end(await self._meter.wait_for_overshoot(self._pause))
                except StorageUnavailable:
                    logger.exception("the workspace cannot be measured: its limit does not hold")
                    await anyio.sleep(_TRY_AGAIN_S)

    def stop(self) -> None:
        self._watching.cancel()

    async def _pause(self, least_s: float) -> None:
        if not self._calls:
            self._called = anyio.Event()
            with anyio.move_on_after(_BETWEEN_CALLS_S):
                await self._called.wait()
        await anyio.sleep(least_s)

    async def _end(self, found: SandboxError) -> None:
        self._problem = type(found)(f"the call was ended: {found}")
        if not self._calls:
            logger.warning("ending a sandbox for what it does in the background: %s", found)
            await self._end_sandbox()
        for scope in self._calls:
            scope.cancel()
