"""Notebooks as pid 1 sees them: which exist, and which cell each runs.

A notebook is a Python worker whose command stays (notebook.py), with a socket to it. User code
can write to that socket: a malformed message ends the notebook, and nothing else.
"""

from __future__ import annotations

import os

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.loop import READ
from mcp_sandbox.runner.kernel.native import make_socket_pair, receive, send, signal
from mcp_sandbox.runner.wire.protocol import OpError
from mcp_sandbox.runner.workers.fork_server import FILES, Notebook, is_valid_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.workers.fork_server import Listener
    from mcp_sandbox.runner.workers.pool import Pool

_MOST = 8
_INTERRUPT_S = 2.0
_ANSWER_S = 5.0
# The worker reports the end of the process, a moment after the socket has closed.
_MOMENT_S = 0.5


class Notebooks:
    """The notebooks by name; each runs one cell at a time."""

    def __init__(self, loop: Loop, pool: Pool) -> None:
        self._loop = loop
        self._pool = pool
        self.notebooks: dict[str, Notebook] = {}

    def start(self, job: dict[str, Any], fds: list[int], listener: Listener) -> Notebook:
        """Run a cell; `listener` gets its events. OpError if busy, or with too many notebooks."""
        name = job["notebook"]
        found = self.notebooks.get(name)
        if found and found.listener:
            raise OpError("busy", f"notebook {name} still does a cell, {found.cell}: wait for it")
        if found:
            found.state = "kept"
        found = found or self._begin(name, job)
        found.listener, found.cell = listener, job["id"]
        if found.limit:
            found.limit.cancel()
        if job["timeout_s"] is not None:
            found.limit = self._loop.call_later(job["timeout_s"], lambda: self._ask(found))
        self._pool.free_held()
        self._pool.rest(found.python_worker, rests=False)
        try:
            settings = {key: job[key] for key in ("env", "grow", "kept", "workspace")}
            send(found.control, settings, fds)
        except OSError:
            # It was closed or is not read: the listener learns that the notebook died.
            self._pool.kill(found.python_worker)
        if main := found.python_worker.main:
            # User code may have stopped the process.
            processes.send(main, signal.SIGCONT)
            listener({"e": "pid", "pid": main})
        return found

    def _ask(self, notebook: Notebook) -> None:
        """End a notebook in which the last cell runs on at its limit, though it told its end."""
        if not notebook.listener and notebook.state != "ended":
            cell, notebook.is_asked = notebook.cell, True
            try:
                send(notebook.control, {"ask": True}, [])
            except OSError:
                self._pool.kill(notebook.python_worker)
            self._loop.call_later(
                _ANSWER_S, lambda: self._kill(notebook, notebook.is_asked and notebook.cell == cell)
            )

    def is_ending(self, name: str) -> bool:
        """Return whether it is killed, and its end is not known yet: it would take no cell."""
        found = self.notebooks.get(name)
        return bool(found and found.python_worker.doomed)

    def _begin(self, name: str, job: dict[str, Any]) -> Notebook:
        if len(self.notebooks) >= _MOST:
            names = ", ".join(self.notebooks)
            raise OpError("busy", f"{_MOST} notebooks are the most: use or stop one of {names}")
        mine, theirs = make_socket_pair()
        mine.setblocking(False)
        new, nothing = Notebook(mine), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        fds = [nothing, nothing, nothing, theirs.fileno()]
        try:
            new.python_worker = self._pool.start(
                {**job, "grow": True},
                fds,
                lambda message: self._on_worker_message(name, message),
                is_python=True,
            )
        except OpError:
            mine.close()
            raise
        finally:
            theirs.close()
            os.close(nothing)
        self._loop.watch(mine.fileno(), READ, lambda _events: self._on_message(new))
        self.notebooks[name] = new
        return new

    def interrupt(self, notebook: Notebook) -> None:
        """Interrupt the cell; after 2 s kill the notebook with all that it has started."""
        listener, main = notebook.listener, notebook.python_worker.main
        if main:
            processes.send(-main, signal.SIGINT)
        self._loop.call_later(
            _INTERRUPT_S if main else 0, lambda: self._kill(notebook, notebook.listener is listener)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for idle notebooks; a busy one is listed as the command that is its cell."""
        return [each.row(name) for name, each in self.notebooks.items() if not each.listener]

    def stop(self, name: str, done: Callable[[dict[str, Any]], None]) -> None:
        """End an idle notebook; `done` gets the same result as for a stopped command."""
        notebook = self.notebooks[name]

        def on_end(_message: dict[str, Any]) -> None:
            row = notebook.row(name)
            printed = {"sizes": [0] * 4, "starts": [0, 0], "totals": [0, 0], "until_met": False}
            ended = {"process": name, "duration_ms": 1000 * row["seconds"], "notebook": "ended"}
            unknown = dict.fromkeys(("left_s", "output_file", *FILES))
            done({**row, **printed, **ended, **unknown, "figures": [], "shell": []})

        notebook.listener, notebook.cell = on_end, "its end"
        self._pool.kill(notebook.python_worker)

    def _kill(self, notebook: Notebook, still: bool) -> None:
        if still and notebook.state != "ended":
            self._pool.kill(notebook.python_worker)

    def _on_message(self, notebook: Notebook) -> None:
        message: Any = None
        try:
            message, _ = receive(notebook.control, 65536, wait=False)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            pass
        listener = notebook.listener
        if message == {"e": "rests"} and notebook.is_asked:
            notebook.is_asked = False
        elif (
            listener
            and isinstance(message, dict)
            and message.get("e") == "exit"
            and is_valid_message(message)
        ):
            notebook.listener = None
            self._pool.rest(notebook.python_worker, rests=True)
            listener(message)
        else:
            self._loop.unwatch(notebook.control.fileno())
            # The worker reports why it died, unless only the socket was closed.
            self._loop.call_later(_MOMENT_S, lambda: self._kill(notebook, True))

    def _on_worker_message(self, name: str, message: dict[str, Any]) -> None:
        notebook = self.notebooks[name]
        if message["e"] in ("exit", "fail", "lost"):
            del self.notebooks[name]
            self._loop.unwatch(notebook.control.fileno())
            notebook.control.close()
            notebook.state, notebook.python_worker.listener = "ended", None
            if message["e"] == "exit":
                self._pool.rest(notebook.python_worker, rests=False)
        if notebook.listener:
            # The files that changed since the notebook's start are not this cell's.
            notebook.listener({**message, **dict.fromkeys(FILES)})
