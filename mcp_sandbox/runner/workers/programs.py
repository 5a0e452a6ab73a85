"""Starts programs as jobs say: where, on which descriptors or terminal, with which priority."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

from mcp_sandbox.runner.files.paths import resolve
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire.protocol import UNWATCHED, OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Signals of a stray `pkill`: ignored here, and put back to default in started programs.
SHIELDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
)
DEFAULT_SIGNALS = (*SHIELDED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
_NICER_BY = 5
_MOMENT_S = 0.001


def spawn(job: dict[str, Any], fds: list[int]) -> int:
    """Start a program with fds as stdin, stdout, stderr and perhaps code. May raise OpError."""
    enter(job["cwd"])
    try:
        return begin(job, fds) if job["grow"] else _spawn_stunted(job, fds)
    except OSError as exc:
        raise cannot_start(job["argv"][0], exc) from exc


def begin(job: dict[str, Any], fds: list[int]) -> int:
    """Start a program as a session leader; with a `tty`, the first of `fds` is its terminal."""
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    if job["tty"]:
        # The first terminal that a session leader opens becomes its controlling terminal.
        actions[0] = (os.POSIX_SPAWN_OPEN, 0, os.ttyname(fds[0]), os.O_RDWR, 0)
    how: dict[str, Any] = {"setsid": True, "setsigdef": DEFAULT_SIGNALS}
    return os.posix_spawnp(job["program"], job["argv"], job["env"], file_actions=actions, **how)


def _spawn_stunted(job: dict[str, Any], fds: list[int]) -> int:
    """Start it while this process's limit is lowered: from outside it would be too late."""
    import resource  # noqa: PLC0415 - only where the workspace is full

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        return begin(job, fds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def enter(cwd: str) -> None:
    """Change to the working directory of a job; OpError if it cannot be used."""
    path = resolve(cwd)
    try:
        os.chdir(path)
    except OSError as exc:
        from mcp_sandbox.runner.files.call import explain  # noqa: PLC0415 - only to refuse

        raise OpError("not_found", f"cwd {explain(exc, path).message}") from exc


def cannot_start(program: str, exc: OSError) -> OpError:
    """Return the error for a program that could not be started."""
    if exc.errno == errno.EAGAIN:
        return OpError("process_limit", "no process could be started: the process limit is reached")
    if exc.errno == errno.E2BIG:
        return OpError("too_large", "arguments and environment are too large; pass data by stdin")
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return OpError("unsupported", f"{program!r} is not installed in this sandbox")
    return OpError("invalid", f"{program!r} cannot be started: {os.strerror(exc.errno or 0)}")


def lower_priority(pid: int, *, grow: bool, memory: int = 0, again: bool = True) -> None:
    """Lower the process's CPU priority, and offer it to the OOM killer before others.

    Without `grow`, the kernel lets it extend no file; `memory` is what its call may hold.
    """
    try:
        if memory or not grow:
            import resource  # noqa: PLC0415 - only for a call with such limits

            if not grow:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            if memory:
                # Twice as much: stacks of threads are reserved, and hardly used.
                resource.prlimit(pid, resource.RLIMIT_DATA, (2 * memory, 2 * memory))
        os.setpriority(os.PRIO_PROCESS, pid, _NICER_BY)
        offer_to_the_oom_killer(pid)
    except PermissionError:
        # Just after exec the process is still as protected as this one; a later refusal is final.
        if again:
            time.sleep(_MOMENT_S)
            lower_priority(pid, grow=grow, memory=memory, again=False)
    except ProcessLookupError:
        return


def offer_to_the_oom_killer(pid: int | str) -> None:
    """Let the kernel end this process before the runner's when memory runs out."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")
    except FileNotFoundError:
        # Ended already, or a sandbox without this file.
        return


def drop_unwatched(env: dict[str, str]) -> dict[str, str]:
    """Return the variables of a program on a terminal."""
    return {name: value for name, value in env.items() if UNWATCHED.get(name) != value}


def resize(terminal: int, rows: int, columns: int) -> None:
    """Set the size of a terminal, given either of its ends."""
    import termios  # noqa: PLC0415 - terminals alone need it

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
