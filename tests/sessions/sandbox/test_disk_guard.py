"""The guard that ends what writes too much, beside the calls."""

import anyio
import anyio.lowlevel

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.sessions.sandbox.context import DiskGuard
from mcp_sandbox.workspace.meter import Checkpoint, DiskUsage, FreeSpace, TreeUsage

MIB = 1024**2


async def test_a_sandbox_that_cannot_be_ended_now_ends_nothing_else() -> None:
    sizes = iter(range(0, 1_000_000 * MIB, 100 * MIB))
    tried = anyio.Event()

    def measure(_checkpoint: Checkpoint) -> tuple[TreeUsage, FreeSpace]:
        return TreeUsage(next(sizes), 1), FreeSpace(1_000_000 * MIB, None)

    async def end_sandbox() -> None:
        tried.set()
        raise BackendUnavailable("the engine does not answer")

    settings = WorkspaceConfig(size_limit=50 * MIB)
    meter = DiskUsage(measure, settings, limiter=anyio.CapacityLimiter(1), least_interval_s=0.01)
    guard = DiskGuard(meter, end_sandbox)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(guard.run)
            await tried.wait()
            await anyio.wait_all_tasks_blocked()
            with guard.guard_call():
                await anyio.lowlevel.checkpoint()
            guard.watching.cancel()
