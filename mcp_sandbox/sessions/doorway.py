"""The doors of one open sandbox: their channel, which is there from the first of them on."""

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.runtime.doors import Doors, open_doors


class Doorway:
    """Opens doors until it is closed, with the sandbox or for a pause."""

    def __init__(self, sandbox: Sandbox, tasks: TaskGroup) -> None:
        self._sandbox = sandbox
        self._tasks = tasks
        self._lock = anyio.Lock()
        self._doors: Doors | None = None
        self._scope = anyio.CancelScope()

    def close(self) -> None:
        """End the channel, and with it all handlers."""
        self._scope.cancel()

    async def doors(self) -> Doors:
        """The channel, opened if need be; SandboxGone, if the sandbox does not answer."""
        async with self._lock:
            if self._doors is None or self._doors.ended:
                self._doors = await self._tasks.start(self._open)
            return self._doors

    async def _open(self, *, task_status: TaskStatus[Doors]) -> None:
        doors: Doors | None = None
        with anyio.CancelScope() as self._scope:
            async with open_doors(self._sandbox.open_channel, self._sandbox.token) as doors:
                task_status.started(doors)
                await doors.wait_ended()
        if doors is None:
            raise SandboxGone("the sandbox was ended before a door could be opened")
