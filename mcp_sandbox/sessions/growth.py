"""Ends a call whose files grow over the limit while it runs."""

import logging

import anyio

from mcp_sandbox.errors import SandboxError, StorageUnavailable
from mcp_sandbox.workspace.meter import Meter

logger = logging.getLogger(__name__)


class GrowthWatch:
    """Cancels `guarded` when the meter says so, and keeps the reason in `problem`."""

    def __init__(self, meter: Meter) -> None:
        self.guarded = anyio.CancelScope()
        self.watching = anyio.CancelScope()
        self.problem: SandboxError | None = None
        self._meter = meter

    async def run(self, after_s: float) -> None:
        """Watch from `after_s` seconds on, until `watching` is cancelled."""
        with self.watching:
            await anyio.sleep(after_s)
            try:
                found = await self._meter.wait_for_overshoot()
            except StorageUnavailable:
                logger.exception("the workspace could not be measured; its limit does not hold now")
                return
            self.problem = type(found)(f"the call was ended: {found}")
            self.guarded.cancel()
