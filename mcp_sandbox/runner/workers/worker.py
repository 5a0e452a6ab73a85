"""A worker: a process that does one job at a time and is the subreaper of all that it starts.

Killing it ends the job: whatever the job started falls to pid 1, which kills it. It talks to pid 1
over a socket pair, one JSON datagram a message, file descriptors attached.
"""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.calls.shell import SAVE, WHOLE, saver
from mcp_sandbox.runner.files import kept
from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.native import Socket, close, make_socket_pair, receive, send, signal
from mcp_sandbox.runner.wire.protocol import MAX_HEADER, OpError
from mcp_sandbox.runner.workers.child import code_path
from mcp_sandbox.runner.workers.programs import SHIELDED, lower_priority

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Starter = Callable[[dict[str, Any], list[int]], int]

_MAX_MEMORY = 4 * 1024 * 1024
_CLOCK_REALTIME_COARSE = 5  # Linux's number; Python has no name for it.
# The search for changed files takes no longer: enough for a project.
_BUDGET_S = 0.05
_MOST_NAMES = 20
# More would take longer to sort than to find.
_MOST_SORTED = 1000
# A character may take six bytes in JSON; all names go into one message of 64 KiB.
_LONGEST_NAME = 500
_SKIPPED = {".git", "node_modules", "__pycache__", ".venv"}
# Of a folder: when its names last changed, its files, and the paths of its folders.
_Folder = tuple[int, set[str], list[str]]
_NONE: _Folder = (-1, set(), [])

# A line on descriptor 4 starts it; without that nothing is run. The command is a file on 3: argv
# has a size limit and shows in process lists.
BASH = (
    "IFS= read -r -u 4 __code || kill -KILL $$; exec 4<&-; SECONDS=0; "
    'mapfile -d "" -t -u 3 __code; exec 3<&-; eval "unset __code; $__code"'
)


def serve(control: Socket, start: Starter, prepare: Callable[[], None] = lambda: None) -> None:
    """Do jobs until pid 1 closes the socket. `start` starts a command and returns its pid.

    `prepare` is called before each wait for a job.
    """
    processes.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    worker = Worker(control, start)
    prepare()
    while worker.do_next():
        prepare()


class Worker:
    """The child's side of one socket pair."""

    def __init__(self, control: Socket, start: Starter) -> None:
        self._control = control
        self._start = start
        self._names = SeenNames()

    def do_next(self) -> bool:
        """Wait for a job and do it; return False when there will be no more."""
        job, fds = receive(self._control, MAX_HEADER + 4096, 4)
        if job is None:
            return False
        is_free = False
        try:
            is_free = self._do(job, fds)
        except OpError as exc:
            self._say(e="fail", code=exc.code, message=exc.message)
        except MemoryError:
            self._say(e="fail", code="too_large", message="the call ran out of memory")
        finally:
            close(fds)
        if job["op"] == "terminal":
            # What a person left running in it ends with this process.
            return False
        if not is_free:
            self._say(e="free")
        return True

    def _do(self, job: dict[str, Any], fds: list[int]) -> bool:
        """Do a job; return whether its last message has already told that the worker is free."""
        if job["op"] in ("command", "standby"):
            return self._gated(job, fds) if job["gated"] else self._command(job, fds)
        self._operation(job, fds)
        return False

    def _say(self, **message: object) -> None:
        send(self._control, message, [])

    def _command(self, job: dict[str, Any], fds: list[int]) -> bool:
        self._names.begin(job["workspace"])
        self._say(e="begin")
        pid = self._start(job, fds)
        self._say(e="pid", pid=pid)
        close(fds)
        lower_priority(pid, grow=job["grow"], memory=job["memory"])
        return self._see_through(pid, job, [])

    def _gated(self, job: dict[str, Any], fds: list[int]) -> bool:
        """Start a bash that waits at a gate, and open that when pid 1 knows its pid.

        A standby bash also waits there for its command.
        """
        # A socket: unlike a pipe, no other process can open it by its path below /proc.
        opener, gate = make_socket_pair()
        try:
            pid = self._start(job, [*fds, gate.fileno()])
            self._names.begin(job["workspace"])
            if job["op"] == "standby":
                named, _ = receive(self._control, MAX_HEADER + 4096, 0)
                if named is None:
                    raise SystemExit
                job = {**job, **named}
                if os.waitpid(pid, os.WNOHANG)[0]:
                    # User code killed it while it waited; it never saw its command.
                    pid = self._start(job, [*fds, gate.fileno()])
                self._names.begin(job["workspace"])
            remarks = recall(job["shell"]) if job["shell"] else []
            self._say(e="pid", pid=pid)
            lower_priority(pid, grow=job["grow"], memory=job["memory"])
            close(fds)
            processes.send(pid, signal.SIGCONT)
            opener.send(b"\n")
        finally:
            gate.close()
            opener.close()
        return self._see_through(pid, job, remarks)

    def _see_through(self, pid: int, job: dict[str, Any], message: list[str]) -> bool:
        status, stays = _await(pid)
        message = message + remember(job["shell"]) if job["shell"] else []
        files = self._names.end(job["workspace"])
        self._say(e="exit", status=status, stays=stays, shell=message, **files)
        if stays:
            _await(None)
        return not stays

    def _operation(self, job: dict[str, Any], fds: list[int]) -> None:
        # Loaded at the first use: most sandboxes begin with a command.
        if job["op"] == "terminal":
            from mcp_sandbox.runner.calls.terminal import run as operate  # noqa: PLC0415
        else:
            from mcp_sandbox.runner.files.operations import OPS  # noqa: PLC0415

            operate = OPS[job["op"]]
        signal.signal(signal.SIGTERM, _abort)
        try:
            self._say(e="begin")
            result = operate(job["args"], fds[0], fds[1], bytes.fromhex(job["end"]), fds[2])
            self._say(e="done", result=result)
        except SystemExit as exc:
            raise OpError("cancelled", "the call was cancelled") from exc
        except BrokenPipeError as exc:
            raise OpError("cancelled", "the caller no longer reads the result") from exc
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def recall(memory: str) -> list[str]:
    """Prepare to load a shell's state; return remarks about the state found."""
    try:
        kept.remove(f"{memory}.new")
        kept.remove(f"{memory}.moved")
        if _content(saver(memory)) != SAVE:
            # Other shells may write or run it at the same time: rename it into place.
            kept.remove(f"{memory}.save")
            with open(kept.create(f"{memory}.save"), "wb") as file:
                file.write(SAVE)
            _rename(f"{memory}.save", saver(memory))
        if _size_if_complete(memory):
            return []
        kept.within(memory, lambda name, folder: os.unlink(name, dir_fd=folder))
    except FileNotFoundError:
        return ["new"]
    except OSError as exc:
        why = f"no shell can be kept in {memory}: {os.strerror(exc.errno or 0)}"
        raise OpError("wrong_kind", why) from exc
    return ["broken"]


def remember(memory: str) -> list[str]:
    """Move a shell's new state into place if complete; return remarks about it."""
    remarks, size = ["moved"] * kept.remove(f"{memory}.moved"), _size_if_complete(f"{memory}.new")
    try:
        if size > len(WHOLE):
            _rename(f"{memory}.new", memory)
    except OSError:
        size = 0
    return remarks if size else [*remarks, "kept"]


def _size_if_complete(memory: str) -> int:
    content = _content(memory)
    return len(content) if content.endswith(WHOLE) and len(content) <= _MAX_MEMORY else 0


def _content(path: str) -> bytes:
    """Return the content of a shell's file; user code may have put anything there."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = kept.within(path, lambda name, folder: os.open(name, flags, dir_fd=folder))
        try:
            return os.read(file, _MAX_MEMORY + 1)
        finally:
            os.close(file)
    except OSError:
        return b""


def _rename(path: str, to: str) -> None:
    def act(name: str, folder: int) -> None:
        os.rename(name, os.path.basename(to), src_dir_fd=folder, dst_dir_fd=folder)

    kept.within(path, act)


def _abort(_number: int, _frame: object) -> None:
    raise SystemExit


def _await(main: int | None) -> tuple[int, bool]:
    """Wait for the end of `main`, or of all; return its wait status, and whether others run on."""
    status, options = 0, 0
    while True:
        try:
            # Look first: if this wait were killed after reaping, pid 1 would miss the status.
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
        except ChildProcessError:
            return status, False
        if seen is None:
            return status, True
        pid, ended = os.waitpid(seen.si_pid, 0)
        if pid == main:
            # Collect what ended together with it, without waiting for the others.
            status, options = ended, os.WNOHANG


def remove_code(name: str) -> None:
    """Delete the code of a call that has ended, if it is still there."""
    # The code may have removed it, or put something else there.
    kept.remove(code_path(name), own=0)


def _now_coarse() -> int:
    """Return the clock that stamps files, in ns: the precise clock would run ahead of it."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


class SeenNames:
    """The files of the workspace by folder, as one worker saw them last; links are not followed."""

    def __init__(self) -> None:
        # None when there was too much to read.
        self._seen: dict[str, _Folder] | None = {}
        self._found: dict[str, tuple[int, int, int]] = {}
        self._since_ns = 0

    def begin(self, workspace: str) -> None:
        """Note the state when a command begins. Only folders with changed names are read again."""
        self._since_ns, self._found = _now_coarse(), {}
        if self._seen is not None:
            self._look(workspace, _BUDGET_S / 10, begins=True)

    def end(self, workspace: str) -> dict[str, object]:
        """Return up to 20 paths changed since `begin`, by index which of these are new, and counts.

        The counts are of what is new, changed, gone. None is unknown: there was too much to read.
        """
        before, fresh = self._seen, self._found
        self._look(workspace, _BUDGET_S)
        # Files written just before may carry the clock tick in which the command began.
        found = [path for path, state in self._found.items() if fresh.get(path) != state]
        first, now = _first(found), self._seen
        names = [_name(path, workspace) for path in first]
        if before is None or now is None:
            unknown = names if now or names else None
            return {"changed": unknown, "created": None, "counts": None}
        parts = (path.rpartition("/") for path in found)
        there = (name in before.get(folder, _NONE)[1] for folder, _, name in parts)
        old = {path for path, was in zip(found, there) if was}
        new = sum(len(seen[1] - before.get(path, _NONE)[1]) for path, seen in now.items())
        gone = sum(len(old[1] - now.get(path, _NONE)[1]) for path, old in before.items())
        created = [at for at, path in enumerate(first) if path not in old]
        return {"changed": names, "created": created, "counts": [new, len(old), gone]}

    def _look(self, top: str, budget_s: float, *, begins: bool = False) -> None:
        deadline = time.monotonic() + budget_s
        known, seen, pending, unread = self._seen or {}, {}, [top], False
        self._seen, self._found = None, {}
        while pending and time.monotonic() < deadline:
            folder = pending.pop()
            try:
                seen[folder] = self._read(folder, known.get(folder, _NONE), deadline, begins=begins)
                pending += seen[folder][2]
            except OSError:
                # Removed or closed to this process meanwhile, or too much to read.
                unread = True
        self._seen = None if pending or unread else seen

    def _read(self, folder: str, known: _Folder, deadline: float, *, begins: bool) -> _Folder:
        stamp, since_ns = os.stat(folder).st_ctime_ns, self._since_ns
        if begins and known[0] == stamp:
            return known
        look = not begins or stamp >= since_ns
        # Another change within the same tick of the clock would leave the same time.
        stamp, files, folders = stamp if stamp < _now_coarse() else -1, set(), []
        with os.scandir(folder) as entries:
            for entry in entries:
                if time.monotonic() > deadline:
                    raise TimeoutError
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED:
                        folders.append(entry.path)
                    continue
                files.add(entry.name)
                if look and (state := entry.stat(follow_symlinks=False)).st_ctime_ns >= since_ns:
                    self._found[entry.path] = state.st_ctime_ns, state.st_size, state.st_ino
        return stamp, files, folders


def _first(paths: list[str]) -> list[str]:
    return sorted(sorted(paths)[:_MOST_SORTED], key=_natural)[:_MOST_NAMES]


def _name(path: str, workspace: str) -> str:
    name = os.fsencode(os.path.relpath(path, workspace))
    return name.decode("utf-8", "backslashreplace")[:_LONGEST_NAME]


def _natural(path: str) -> str:
    from itertools import groupby  # noqa: PLC0415 - a millisecond of each first call

    return "".join("".join(run).zfill(20 * digits) for digits, run in groupby(path, str.isdecimal))
