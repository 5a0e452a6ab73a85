"""A worker as pid 1 sees it; `worker` is the same from the inside."""

from __future__ import annotations

from mcp_sandbox.runner import processes
from mcp_sandbox.runner.native import send, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mcp_sandbox.runner.native import Socket

    Listener = Callable[[dict[str, Any]], None]


class Worker:
    """One worker as pid 1 sees it. `listener` gets its messages while it has a job."""

    def __init__(self, pid: int | None, control: Socket, *, seat: bool) -> None:
        self.pid = pid  # A seat's is known once it has said hello.
        self.control = control
        self.seat = seat
        self.listener: Listener | None = None
        # Of the command it has, once it has said so.
        self.main: int | None = None
        # Its command has ended and left something running.
        self.lingers = False

    def wake(self) -> None:
        """User code may have stopped it."""
        if self.pid:
            processes.send(self.pid, signal.SIGCONT)

    def give(self, job: dict[str, Any], fds: list[int]) -> None:
        send(self.control, job, fds)
