"""Workers and the warm interpreter as pid 1 sees them; inside: `worker`, `python_worker`."""

from __future__ import annotations

import os
import sys
import time

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.native import CONTROL_FD, Socket, make_socket_pair, send, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Timer

    Listener = Callable[[dict[str, Any]], None]

# Variables that the C library or Python reads only when a program starts.
_STEERING = ("PYTHON", "LD_", "GLIBC_", "MALLOC_")
# The kernel's own limit for process ids.
_MOST_PID = 2**22
# What is told of the files that changed meanwhile; None where that is unknown.
FILES = ("changed", "created", "counts")


class WorkerHandle:
    """One worker as pid 1 sees it. `listener` gets its messages while it has a job."""

    def __init__(self, pid: int | None, control: Socket, *, is_python: bool) -> None:
        self.pid = pid  # A Python worker's is known after its first message.
        self.control = control
        self.is_python = is_python
        self.listener: Listener | None = None
        # The process of its command, once it has reported that.
        self.main: int | None = None
        # Its command has ended, but processes that it started still run.
        self.lingers = False
        self.rest_ended: Callable[[], None] = lambda: None
        # Its command outlived its call, and is killed first when room is needed.
        self.released = False
        # It is being killed, or will be as soon as its pid is known.
        self.doomed = False
        self.job: dict[str, Any] | None = None

    def wake(self) -> None:
        """Continue the process, which user code may have stopped."""
        if self.pid:
            processes.send(self.pid, signal.SIGCONT)

    def give(self, job: dict[str, Any], fds: list[int]) -> None:
        self.wake()
        send(self.control, job, fds)
        self.job = job


class Notebook:
    """One notebook; for the command that is its current cell, it stands for the worker."""

    python_worker: WorkerHandle

    def __init__(self, control: Socket) -> None:
        self.control = control
        # The listener and id of the cell that runs.
        self.listener: Listener | None = None
        self.cell = ""
        # Its limit, which it may not pass by telling an end, and whether the answer is awaited.
        self.limit: Timer | None = None
        self.is_asked = False
        # The state that the last cell reported.
        self.state = "new"
        self._started = time.monotonic()
        self.released = False

    @property
    def pid(self) -> int | None:
        return self.python_worker.pid

    def row(self, name: str) -> dict[str, Any]:
        ended, seconds = self.state == "ended", round(time.monotonic() - self._started, 1)
        row = {"id": name, "command": "(waits for its next cell)", "of": "notebook"}
        how = {"running": not ended, "why": "stopped" if ended else None, "seconds": seconds}
        return {**row, **how, "exit_code": None, "signal": None, "out_of_memory": False}


def is_pid(value: object) -> bool:
    """Return whether this can be the id of a process below pid 1."""
    return isinstance(value, int) and 1 < value <= _MOST_PID and value != os.getpid()


def is_valid_message(message: dict[str, Any]) -> bool:
    """Return whether a worker's message has the form that its listener relies on."""
    event = message.get("e")
    if event == "begin":
        return True
    if event == "pid":
        return is_pid(message.get("pid"))
    if event == "exit":
        known = _is_number(message.get("status"), 0xFFFF) and isinstance(message.get("stays"), bool)
        named = _is_list(message.get("changed"), range(21), lambda name: _is_short(name, 500))
        shell = _is_list(message.get("shell"), range(4), lambda word: _is_short(word, 20))
        new = _is_list(message.get("created"), range(21), lambda at: _is_number(at, 19))
        counted = _is_list(message.get("counts"), (3,), _is_number)
        return known and named and shell and new and counted
    if event == "done":
        return isinstance(message.get("result"), dict)
    return event == "fail" and all(_is_short(message.get(key), 8000) for key in ("code", "message"))


def _is_number(value: object, most: int = 2**31) -> bool:
    return isinstance(value, int) and 0 <= value <= most


def _is_list(value: object, sizes: Collection[int], of: Callable[[object], bool]) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) in sizes and all(map(of, value))
    )


def _is_short(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


def is_steered(env: Iterable[str]) -> bool:
    """Return whether one of these variables changes how Python starts."""
    # PYTHONUNBUFFERED is applied when the code starts (python_worker.py).
    return any(name.startswith(_STEERING) and name != "PYTHONUNBUFFERED" for name in env)


def fork_interpreter(env: dict[str, str]) -> tuple[int, Socket]:
    """Fork the interpreter off this process, an ordinary Python that holds no secret yet."""
    mine, theirs = make_socket_pair()
    pid = os.fork()
    if pid == 0:
        from mcp_sandbox.runner.workers import python_worker  # noqa: PLC0415

        mine.detach()
        python_worker.become(theirs, env)
    theirs.close()
    return pid, mine


def start_interpreter(env: dict[str, str]) -> tuple[int, Socket]:
    """Start it; return its pid and the socket to ask it for workers. May raise OSError."""
    mine, theirs = make_socket_pair()
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python_worker.py")
    try:
        pid = os.posix_spawn(
            sys.executable,
            ["python3", program],
            env,
            file_actions=[
                # Output of the chat's start-up files is dropped, and never reaches the host.
                *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)),
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), CONTROL_FD),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except OSError:
        mine.close()
        raise
    finally:
        theirs.close()
    return pid, mine


class PythonForkServer:
    """The warm Python, if any; it forks the Python workers."""

    def __init__(
        self,
        env: dict[str, str],
        watch: Callable[[WorkerHandle], WorkerHandle],
        started: Callable[[], None],
    ) -> None:
        self._env = env
        self._watch = watch
        self._started = started
        self.worker: WorkerHandle | None = None
        # One of its workers has reported: start-up files do not delay them.
        self.forks = False

    def start_python_worker(self) -> WorkerHandle:
        """Ask for a worker, starting an interpreter if there is none. May raise OSError."""
        mine, theirs = make_socket_pair()
        try:
            self._warm().give({"op": "python_worker"}, [theirs.fileno()])
        except ConnectionError:
            # It has ended, which has not been reported yet.
            self.worker = None
            self._warm().give({"op": "python_worker"}, [theirs.fileno()])
        finally:
            theirs.close()
        return self._watch(WorkerHandle(None, mine, is_python=True))

    def _warm(self) -> WorkerHandle:
        if self.worker:
            return self.worker
        self._started()
        return self.adopt(*start_interpreter(self._env))

    def adopt(self, pid: int, control: Socket) -> WorkerHandle:
        self.worker, self.forks = self._watch(WorkerHandle(pid, control, is_python=False)), False
        return self.worker
