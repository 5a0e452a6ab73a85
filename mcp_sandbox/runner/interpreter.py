"""The warm interpreter (python.py) as pid 1 sees it: started as a program or as a fork."""

from __future__ import annotations

import os
import sys

from mcp_sandbox.runner.handle import Worker
from mcp_sandbox.runner.native import Socket, pair, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CONTROL_FD = 3
# What the C library or Python looks at when a program starts, and not later.
_STEERING = ("PYTHON", "LD_", "GLIBC_", "MALLOC_")


def is_steered(env: Iterable[str]) -> bool:
    """Whether variables of these names make another Python than one that starts without them."""
    # PYTHONUNBUFFERED is applied when the code starts (python.py).
    return any(name.startswith(_STEERING) and name != "PYTHONUNBUFFERED" for name in env)


def fork(env: dict[str, str]) -> tuple[int, Socket]:
    """Like `start`, from an ordinary Python that holds no secret yet: without starting another.

    Raises:
        OSError: no process can be started.
    """
    mine, theirs = pair()
    pid = os.fork()
    if pid == 0:
        from mcp_sandbox.runner import python  # noqa: PLC0415

        mine.detach()
        python.become(theirs, env)
    theirs.close()
    return pid, mine


def start(env: dict[str, str]) -> tuple[int, Socket]:
    """Its pid, and our end of the socket by which it is asked for seats.

    Raises:
        OSError: no process can be started.
    """
    mine, theirs = pair()
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python.py")
    try:
        pid = os.posix_spawn(
            sys.executable,
            ["python3", program],
            env,
            file_actions=[
                # What the chat's start-up files print goes nowhere, least of all to the host.
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


class Interpreter:
    """The one that is warm now, if any. It forks the seats."""

    def __init__(
        self,
        env: dict[str, str],
        watch: Callable[[Worker], Worker],
        started: Callable[[], None],
    ) -> None:
        self._env = env
        self._watch = watch
        self._started = started
        self.worker: Worker | None = None

    def seat(self) -> Worker:
        """Ask for a seat, starting an interpreter when there is none.

        Raises:
            OSError: no process can be started.
        """
        mine, theirs = pair()
        try:
            self._warm().give({"op": "seat"}, [theirs.fileno()])
        except ConnectionError:
            # It has ended, and we have not heard it yet.
            self.worker = None
            self._warm().give({"op": "seat"}, [theirs.fileno()])
        finally:
            theirs.close()
        return self._watch(Worker(None, mine, seat=True))

    def _warm(self) -> Worker:
        if self.worker:
            return self.worker
        self._started()
        return self.adopt(*start(self._env))

    def adopt(self, pid: int, control: Socket) -> Worker:
        """Take over a started one."""
        self.worker = self._watch(Worker(pid, control, seat=False))
        return self.worker

    def lost(self, gone: Worker) -> None:
        """It has ended, if it was this one."""
        if gone is self.worker:
            self.worker = None
