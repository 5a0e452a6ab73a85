"""The warm interpreter: an ordinary Python that forks a fresh `__main__` for each piece of code.

Started as a program of its own, or as a fork of pid 1 before that has the token: what runs here
is user code, with the site-packages, the environment and the flags that `python3 file.py` would
have. The interpreter forks Python workers; each of them forks the process that runs the code.
"""

from __future__ import annotations

import gc
import io
import os
import sys

_ROOT = os.path.abspath(__file__).rsplit("/", 4)[0]
sys.path[0] = _ROOT

from mcp_sandbox.runner.kernel import native, processes  # noqa: E402
from mcp_sandbox.runner.kernel.native import (  # noqa: E402
    Socket,
    make_socket_pair,
    receive,
    send,
    signal,
    wait_for,
)
from mcp_sandbox.runner.wire.protocol import MAX_HEADER, OpError  # noqa: E402
from mcp_sandbox.runner.workers import child, main_file, programs, worker  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Run(BaseException):
    """Unwinds a forked process out of the worker's frames, so that it ends as any program does."""

    def __init__(self, job: dict[str, Any], path: str) -> None:
        super().__init__()
        self.job = job
        self.path = path


def _interpreter(control: Socket) -> None:
    """Fork a Python worker for each request; returns when pid 1 closes the socket."""
    processes.hide_memory()
    processes.rename("mcp-sandbox")
    # To the C library, whose copy was wiped: programs that code starts get their variables there.
    for variable in os.environ.items():
        os.putenv(*variable)
    processes.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in programs.SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    # Exempt all objects so far from collection: a fork that ends would scan and copy them.
    gc.freeze()
    while True:
        request, fds = receive(control, 4096, 1)
        if request is None:
            return
        try:
            pid = os.fork()
        except OSError:
            # No process is left: the socket closes unused. With this one all notebooks would end.
            pid = -1
        if pid == 0:
            control.close()
            _serve_python_worker(Socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])


def _serve_python_worker(control: Socket) -> None:
    processes.die_with_parent()
    send(control, {"e": "hello", "pid": os.getpid()}, [])
    python_worker = _PythonWorker()
    try:
        worker.serve(control, python_worker.start, python_worker.prepare)
    except _Run:
        # Detach, as its number is in use again: Python would warn, and close that file.
        control.detach()
        raise


class _PythonWorker:
    """Forks the processes that run code, one of them ahead of its code."""

    def __init__(self) -> None:
        self._ahead: tuple[int, Socket] | None = None

    def prepare(self) -> None:
        """Fork a process that waits for code; on failure, `start` reports the error."""
        try:
            self._ahead = self._ahead or self._fork([])
        except OSError:
            return

    def start(self, job: dict[str, Any], fds: list[int]) -> int:
        """Give the code of `job` to the waiting process; return its pid."""
        programs.enter(job["cwd"])
        # A notebook gets its code later, cell by cell.
        path = "" if job.get("notebook") else _save(fds[main_file.CODE_FD], job["name"])
        for _ in range(2):
            try:
                pid, ours = self._ahead or self._fork(fds)
            except OSError as exc:
                raise programs.cannot_start("python3", exc) from exc
            self._ahead = None
            # User code may have stopped it.
            processes.send(pid, signal.SIGCONT)
            try:
                send(ours, {"job": job, "path": path}, fds)
            except ConnectionError:
                # User code killed it while it waited; it never saw the code.
                continue
            finally:
                ours.close()
            return pid
        raise OpError("cancelled", "the process was killed before it could run any code")

    def _fork(self, fds: list[int]) -> tuple[int, Socket]:
        ours, theirs = make_socket_pair()
        pid = os.fork()
        if pid == 0:
            # Their numbers are used again in the child: nothing may close them twice.
            fds.clear()
            ours.close()
            self._wait(theirs)
        theirs.close()
        return pid, ours

    def _wait(self, control: Socket) -> None:
        """Wait for code, and raise _Run; exit if the socket closes."""
        _become_ordinary(control.detach())
        given, fds = receive(Socket(fileno=native.CONTROL_FD), MAX_HEADER + 4096, 4)
        if given is None:
            os._exit(0)
        _take_on(given["job"], fds)
        raise _Run(given["job"], given["path"])


def _save(code: int, name: str) -> str:
    """Save the code in a real file, so that tracebacks and `inspect` can show it."""
    path = child.code_path(name)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            os.sendfile(fd, code, 0, os.fstat(code).st_size)
        finally:
            os.close(fd)
    except OSError:
        # /tmp is full: tracebacks have no source lines.
        worker.remove_code(name)
    return path


def _become_ordinary(control: int) -> None:
    """Turn a fork of the worker into an ordinary process with nothing open but `control`."""
    os.setsid()
    os.dup2(control, native.CONTROL_FD)
    os.closerange(native.CONTROL_FD + 1, native.MOST_FDS)
    for number in programs.DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python does this, too: it turns both into exceptions.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The kernel allows this write only while other processes may inspect this one.
    processes.show_memory()
    programs.offer_to_the_oom_killer("self")
    processes.hide_memory()
    main_file.warm_up()


def _take_on(job: dict[str, Any], fds: list[int]) -> None:
    processes.show_memory()
    programs.enter(job["cwd"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(len(fds), native.MOST_FDS)
    if not job["grow"]:
        import resource  # noqa: PLC0415 - only where the workspace is full

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _put_into_environment(job["env"])
    main_file.see_new_packages()
    if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        # By lines: unbuffered, each piece of each print would be a system call.
        sys.stdout.reconfigure(line_buffering=True)


def _put_into_environment(wanted: dict[str, str]) -> None:
    """Make os.environ equal to `wanted`, changing little: each change copies memory."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def become(control: Socket, env: dict[str, str]) -> None:
    """Turn a fork of pid 1 into the interpreter that `start` would have started; never return.

    The chat's start-up files run when pid 1 asks for a worker, not before. Their output is
    dropped, and never reaches the host.
    """
    try:
        processes.die_with_parent()
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        os.dup2(control.detach(), native.CONTROL_FD)
        os.closerange(native.CONTROL_FD + 1, native.MOST_FDS)
        asked = Socket(fileno=native.CONTROL_FD)
        if wait_for(asked):
            _put_into_environment(env)
            main_file.add_user_site()
            _run(asked)
    finally:
        os._exit(1)


def _run(control: Socket) -> None:
    try:
        _interpreter(control)
        os._exit(0)
    except _Run as request:
        job, path = request.job, request.path
    if job.get("notebook"):
        from mcp_sandbox.runner.workers import notebook  # noqa: PLC0415 - seldom

        notebook.run(job)
    main_file.run(path, job["workspace"], job["kept"])


if __name__ == "__main__":
    _run(Socket(fileno=native.CONTROL_FD))
