"""A file operation or a person's shell, run by a worker; its body passes through pid 1."""

from __future__ import annotations

import os

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.loop import PipeReader, PipeWriter, widen_pipe
from mcp_sandbox.runner.kernel.native import close, signal
from mcp_sandbox.runner.wire.protocol import WINDOW, OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.wire.connection import Reply
    from mcp_sandbox.runner.workers.fork_server import WorkerHandle
    from mcp_sandbox.runner.workers.pool import Pool

# How long a cancelled operation may remove what it has made; the host waits for 8 s.
_GRACE_S = 5.0
_TRIES = 3
_END_BYTES = 16


class Operation:
    """A running file operation."""

    def __init__(self, loop: Loop, pool: Pool, reply: Reply, op: str, args: dict[str, Any]) -> None:
        self._loop = loop
        self._reply = reply
        self._pool = pool
        self._worker: WorkerHandle | None = None
        self._credit = WINDOW
        self._job: dict[str, Any] = {"op": op, "args": args}
        self.looks = op == "measure"
        self._given: list[int] = []
        self._tries_left = _TRIES
        self._ending: dict[str, Any] | None = None
        self._inflow: PipeWriter | None = None
        self._tap: PipeReader | None = None

    def start(self, body: bytes, *, more: bool) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        if more:
            widen_pipe(ours_in)
        widen_pipe(ours_out)
        end = os.urandom(_END_BYTES)
        self._inflow = PipeWriter(self._loop, ours_in, self._reply.credit, end)
        self._tap = PipeReader(self._loop, ours_out, self._taken)
        self._job["end"] = end.hex()
        self._given = [theirs_in, theirs_out, os.dup(self._pool.turns)]
        self._launch()
        self.feed(body, more=more)
        # Workers forked from now on have the module loaded.
        import mcp_sandbox.runner.files.operations  # noqa: F401, PLC0415

    def _launch(self) -> None:
        try:
            self._worker = self._pool.start(self._job, self._given, self._on_message)
        except OpError as exc:
            self._end({"e": "fail", "code": exc.code, "message": exc.message})

    def feed(self, data: bytes, *, more: bool) -> None:
        if self._inflow:
            self._inflow.add(data, more=more)

    def credit(self, size: int) -> None:
        self._credit += size
        if self._tap and self._credit > 0:
            self._tap.resume()

    def cancel(self) -> None:
        """Let it clean up; kill it if that takes too long."""
        # No peer takes the rest of the body, or gives credit for it.
        if self._tap:
            self._tap.close()
        if self._ending:
            self._finish()
            return
        if self._worker and self._worker.pid:
            processes.send(self._worker.pid, signal.SIGTERM)
        self._loop.call_later(_GRACE_S, self._kill)

    def _kill(self) -> None:
        if self._ending is None and self._worker:
            self._pool.kill(self._worker)

    def _taken(self, data: bytes) -> None:
        if data:
            self._credit -= len(data)
            self._reply.data("body", data)
            if self._credit <= 0 and self._tap:
                self._tap.pause()
        elif self._ending:
            self._finish()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["e"] == "begin":
            close(self._given)
        elif message["e"] != "lost":
            self._end(message)
        elif self._given and self._tries_left:
            # User code killed the worker before it had begun.
            self._tries_left -= 1
            self._launch()
        else:
            why = "the operation was stopped; look at what it had already done"
            self._end({"e": "fail", "code": "cancelled", "message": why})

    def _end(self, message: dict[str, Any]) -> None:
        if self._ending:
            return
        close(self._given)
        self._ending = message
        if self._worker:
            self._worker.listener = None
        if message["e"] == "fail" and self._tap:
            self._tap.close()
        if not (self._tap and self._tap.open):
            self._finish()

    def _finish(self) -> None:
        ending = self._ending or {}
        if self._inflow:
            self._inflow.close()
        if ending["e"] == "done":
            self._reply.done(ending["result"])
        else:
            self._reply.fail(ending["code"], ending["message"])
