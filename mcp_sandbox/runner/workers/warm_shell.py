"""Keeps one bash ready: started before its command is known, it saves each command that wait.

It runs in the workspace, as the last command did; a command that needs other variables or arguments
is started as usual. A worker holds it, as it holds every command, so it ends with that worker.

It waits only while no call is running, and is killed before other code starts. Background
processes may change its memory, as that of every command of the same user: all is the chat's own.
"""

from __future__ import annotations

import fcntl
import os

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.loop import DeferredAction
from mcp_sandbox.runner.kernel.native import close

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.workers.fork_server import Listener, WorkerHandle
    from mcp_sandbox.runner.workers.pool import Pool

_CODE = 3
# Code that is no command is often followed at once by more, which would pay for the start.
_QUIET_S = 0.05
# Of <linux/fcntl.h>: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE together.
_F_ADD_SEALS = 1033
_ALL_SEALS = 15
# Variables that bash reads when it starts: their files may have changed until the command.
_READ_AT_START = ("BASH_ENV", "BASHOPTS", "SHELLOPTS", "BASH_XTRACEFD")


class PreparedShell:
    """A waiting bash. `ours` and `theirs` are the two ends of its streams, as in a job."""

    def __init__(
        self, worker: WorkerHandle, job: dict[str, Any], ours: tuple[int, int], theirs: list[int]
    ) -> None:
        self.worker = worker
        # The directory, environment and arguments that a command must ask for.
        self.place = job["cwd"], job["env"], job["argv"]
        self.ours = ours
        self.theirs = theirs
        self.born = processes.read_clock_ticks()

    def take_in(self, code: bytes) -> bool:
        """Hand over the command; return False if another process has touched the streams.

        User code can open them below /proc, as it can those of a running command.
        """
        file = self.theirs[_CODE]
        try:
            os.pwrite(file, code, 0)
            fcntl.fcntl(file, _F_ADD_SEALS, _ALL_SEALS)
            same = os.fstat(file).st_size == len(code) and os.pread(file, len(code), 0) == code
        except OSError:
            return False
        return same and all(map(_is_empty, self.ours))

    def close(self) -> None:
        close([*self.ours, *self.theirs])


class WarmShell:
    """The waiting bash, if there is one."""

    def __init__(self, loop: Loop, pool: Pool, under_way: Callable[[], int]) -> None:
        """`under_way` returns the number of running calls."""
        self._pool = pool
        self._under_way = under_way
        self._ready: PreparedShell | None = None
        self._job: dict[str, Any] = {}
        # The result of the last command is sent first.
        self._soon = DeferredAction(loop, 0, self._prepare)
        self._later = DeferredAction(loop, _QUIET_S, self._prepare)

    def expect(self, job: dict[str, Any]) -> None:
        """Prepare for a command like this one.

        Only in the workspace, a mount: any other directory may have been replaced by then.
        """
        is_steered = any(name in job["env"] for name in _READ_AT_START)
        if job["cwd"] == job["workspace"] and job["grow"] and not is_steered:
            self._job = job
        if self._job:
            self._soon.plan()

    def prepare_later(self) -> None:
        """Prepare for the next command, if one was expected before."""
        if self._job:
            self._later.plan()

    def start(self, job: dict[str, Any], code: bytes, listener: Listener) -> PreparedShell | None:
        """Give the waiting bash its command, if it fits; `listener` gets the messages."""
        ready, self._ready = self._ready, None
        if ready is None:
            return None
        fits = ready.place == (job["cwd"], job["env"], job["argv"]) and job["grow"]
        if fits and ready.take_in(code) and self._pool.resume(ready.worker, job, listener):
            return ready
        if self._pool.held is ready.worker:
            self._pool.free_held()
        ready.close()
        return None

    def _prepare(self) -> None:
        if self._under_way() or (self._ready and self._pool.held is self._ready.worker):
            return
        if self._ready:
            self._ready.close()
        self._ready = self._start()

    def _start(self) -> PreparedShell | None:
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.append(os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            out_read, out_write, err_read, err_write, nothing, code = opened
            theirs = [nothing, out_write, err_write, code]
            if worker := self._pool.hold({**self._job, "op": "standby"}, theirs):
                return PreparedShell(worker, self._job, (out_read, err_read), theirs)
        except OSError:
            # No descriptor or process is left: the next command is started as usual.
            pass
        close(opened)
        return None


def _is_empty(pipe_end: int) -> bool:
    os.set_blocking(pipe_end, False)
    try:
        os.read(pipe_end, 1)
    except BlockingIOError:
        return True
    return False
