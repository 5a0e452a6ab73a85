"""Workers as pid 1 manages them: it forks them, gives them jobs, and learns of their end.

Two kinds: plain workers are forked from pid 1, and start programs or do file operations; Python
workers are forked from the warm interpreter (python_worker.py) and fork once more for each piece
of Python.
"""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.kernel import native, processes
from mcp_sandbox.runner.kernel.loop import READ, DeferredAction
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire.protocol import OpError
from mcp_sandbox.runner.workers import programs, worker
from mcp_sandbox.runner.workers.fork_server import (
    PythonForkServer,
    WorkerHandle,
    is_pid,
    is_valid_message,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop, Timer
    from mcp_sandbox.runner.workers.fork_server import Listener, Notebook

# An unused interpreter is ended after this long: it costs about 5 MiB.
_WARM_S = 60.0
_MOST_IDLE = 32
# Calls within this time share one scan of all processes.
_LOOK_S = 0.002
_TIDY_S = 0.005
# Processes left in the background often end together.
_SOON_S = 0.02
# cgroup v2 and v1, as a container with a private cgroup namespace sees its own group.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
MOST_NAMED = 20
_MOST_COMMAND = 120
# A call may count on this many processes and threads; on a share where the limit is low.
_FREE = 64
_SHARE = 4
# A process that does not die in this time, on a disk that hangs, is not waited for.
_DYING_S = 2.0
# A scan reads a file of every process: commands in quick succession skip it.
_ROOMY_S = 0.1


class Pool:
    """All workers, the job of each, and what their jobs leave running."""

    def __init__(self, loop: Loop, env: dict[str, str], most_processes: int) -> None:
        self._loop = loop
        self._room = ProcessLimit(most_processes)
        self._lineage = processes.become_subreaper()
        self._busy: set[WorkerHandle] = set()
        # In it, file operations lock the places of what they change.
        self.turns = os.memfd_create("turns")
        # Workers of idle notebooks.
        self._resting: set[WorkerHandle] = set()
        # The worker whose command waits for `resume`.
        self.held: WorkerHandle | None = None
        self._doomed: set[int] = set()
        self.spares = SpareWorkers(loop, env, self._on_message, self._cool)
        self.orphans = Orphans(loop, self._known, self._notice_child, self._lineage)
        # Planned at every call: each worker gets one signal, however many calls there are.
        self.waking = DeferredAction(loop, _SOON_S, self.wake)
        self._looking = DeferredAction(loop, _SOON_S, lambda: self.on_background())  # noqa: PLW0108 - set later
        self.memory = OomCounter()
        self.on_quiet: Callable[[], None] = lambda: None
        self.on_background: Callable[[], None] = lambda: None
        loop.on_signal(signal.SIGCHLD, self.orphans.reap)

    @property
    def quiet(self) -> bool:
        """Whether nothing of the user runs, not even in the background."""
        return not self._busy and not self.orphans.adopted

    def wake(self) -> None:
        """Continue workers that user code may have stopped: they would never report an end."""
        for one in self._busy:
            one.wake()

    def background(self) -> set[int]:
        """Return the pids that run on although their command has ended."""
        tree = processes.map_parents() if self._resting or self._keepers() else {}
        for one in self._resting:
            one.lingers = _runs_more(one, tree)
        resting = {one.main for one in self._resting}
        found = processes.find_descendants(self._keepers(), tree) - resting
        return found if self._lineage else found.union(self.orphans.find())

    def _keepers(self) -> list[int]:
        busy = [one.pid for one in self._busy if one.pid and (one.lingers or not one.listener)]
        return busy + [one.pid for one in self._resting if one.pid and one.lingers]

    def rest(self, notebook: WorkerHandle, *, rests: bool) -> None:
        """Mark a notebook as idle or busy: idle, only what it has left running counts."""
        (self._resting.add if rests else self._resting.discard)(notebook)
        (self._busy.discard if rests else self._busy.add)(notebook)
        if rests:
            self._looking.plan()
            self.on_quiet()

    def has_room(self, ending: Callable[[Collection[int]], None]) -> bool:
        """Return whether a call has room for its processes; if not, ask again in a moment.

        The largest tree that an earlier command left running is killed; `ending` gets it first.
        """
        # Without subreapers, as under gVisor, no tree is known, and the limit is not of processes.
        roots = [*self._keepers(), *(one.pid for one in self._busy if one.pid and one.released)]
        fits, root = self._room.look(roots) if self._lineage else (True, None)
        if root:
            ending(processes.find_descendants([root], processes.map_parents()))
            self.kill(root)
        return fits

    def start(
        self, job: dict[str, Any], fds: list[int], listener: Listener, *, is_python: bool = False
    ) -> WorkerHandle:
        """Give the job to a free or new worker, or OpError; `listener` gets its messages."""
        if not self._busy:
            self.orphans.reaped.clear()
        if job["op"] in ("command", "terminal"):
            self.free_held()
        while True:
            found = self._take(is_python=is_python)
            try:
                found.give(job, fds)
            except ConnectionError:
                # User code killed it while it was idle; it never saw the job.
                self._lost(found)
            else:
                found.listener = listener
                return found

    def _take(self, *, is_python: bool) -> WorkerHandle:
        try:
            found = self.spares.take(is_python=is_python)
        except OSError as exc:
            self.kill_background()
            raise OpError(
                "process_limit",
                "the sandbox has no process left; what earlier commands had left running in the "
                "background was ended to make room: try again",
            ) from exc
        self._busy.add(found)
        return found

    def hold(self, job: dict[str, Any], fds: list[int]) -> WorkerHandle | None:
        """Let a free worker start a command that waits for `resume`; None without subreapers.

        Orphans are then found by when they began, and this command begins before its call.
        """
        if not self._lineage:
            return None
        self.held = held = self.spares.take(is_python=False)
        try:
            held.give(job, fds)
        except ConnectionError:
            self._lost(held)
        self.spares.prepare()
        return self.held

    def resume(self, held: WorkerHandle, job: dict[str, Any], listener: Listener) -> bool:
        """Let the held command go on; `listener` gets its messages. False if it has died."""
        if held is not self.held:
            return False
        try:
            held.give({key: job[key] for key in ("name", "shell", "memory")}, [])
        except ConnectionError:
            return False
        self.held, held.listener, held.job = None, listener, job
        self._busy.add(held)
        return True

    def _on_message(self, speaker: WorkerHandle) -> None:
        try:
            message, _ = native.receive(speaker.control, 65536, wait=False)
        except BlockingIOError:
            # The event was for a closed descriptor, whose number this one has now.
            return
        except ConnectionError:
            message = None
        except (ValueError, RecursionError):
            message = {}
        if message is None:
            self._lost(speaker)
        elif speaker is not self.spares.interpreter.worker:
            self._take_message(speaker, message)

    def _take_message(self, speaker: WorkerHandle, message: Any) -> None:  # noqa: ANN401 - as it came
        """Act on a worker's message; a worker that sends a malformed one is killed.

        User code can write as a Python worker, whose interpreter loads the chat's start-up files.
        """
        event = message.get("e") if isinstance(message, dict) else None
        if event == "hello" and speaker.pid is None and is_pid(message.get("pid")):
            speaker.pid, self.spares.interpreter.forks = message["pid"], True
            if speaker.doomed:
                self.kill(speaker)
        elif event == "free" and speaker.listener is None and speaker in self._busy:
            self._release(speaker)
        elif speaker.listener and is_valid_message(message):
            if event == "pid":
                speaker.main = message["pid"]
            elif event == "exit":
                speaker.main = None
                self._notice_background(speaker, stays=message["stays"])
            speaker.listener(message)
            # The job ends with its command, unless something of it runs on.
            if event == "exit" and not message["stays"] and speaker.pid not in self._doomed:
                self._release(speaker)
        else:
            self._lost(speaker)
            self.kill(speaker)

    def _release(self, freed: WorkerHandle) -> None:
        self._busy.discard(freed)
        freed.listener, freed.released = None, False
        self._lingers_no_more(freed)
        self.spares.put_back(freed)
        self.on_quiet()

    def free_held(self) -> None:
        """Kill the held command: other code running beside it could change it."""
        held, self.held = self.held, None
        if held and held.pid:
            processes.kill_trees([held.pid])
            self.spares.forget(held)

    def _notice_background(self, speaker: WorkerHandle, *, stays: bool) -> None:
        if stays:
            speaker.lingers = True
            self.on_background()
        if stays or not self._lineage:
            # A process that has just forked still shows the shell's command line for a moment.
            self._looking.plan()

    def _lingers_no_more(self, freed: WorkerHandle) -> None:
        if freed.lingers:
            freed.lingers = False
            self._looking.plan()
            freed.rest_ended()

    def _lost(self, gone: WorkerHandle) -> None:
        self.spares.lose(gone)
        self._busy.discard(gone)
        self._resting.discard(gone)
        if gone is self.held:
            self.held = None
        self._lingers_no_more(gone)
        self.orphans.reap()
        if gone.listener:
            gone.listener({"e": "lost"})
        self.orphans.kill_soon()
        self.on_quiet()

    def kill(self, worker_or_main: WorkerHandle | Notebook | int) -> None:
        """Kill a worker (or an adopted command) with everything below it.

        Later in this round of the loop, so that all trees are searched together.
        """
        pid = worker_or_main if isinstance(worker_or_main, int) else worker_or_main.pid
        warm = self.spares.interpreter
        if pid is None and worker_or_main in self._busy and warm.forks:
            self._kill_unnamed(worker_or_main)
            return
        if pid is None and warm.worker:
            pid = warm.worker.pid
        if pid is not None:
            for one in self._busy | self._resting:
                one.doomed = one.doomed or one.pid == pid
            if not self._doomed:
                self._loop.call_later(0, self._kill_doomed)
            self._doomed.add(pid)

    def _kill_unnamed(self, unnamed: WorkerHandle) -> None:
        """Kill a Python worker once it reports its pid; what forks it has other children."""

        def give_up() -> None:
            if unnamed.pid is None and unnamed in self._busy and self.spares.interpreter.worker:
                self.kill(self.spares.interpreter.worker)

        unnamed.doomed = True
        self._loop.call_later(_DYING_S, give_up)

    def _kill_doomed(self) -> None:
        doomed, self._doomed = self._doomed, set()
        processes.kill_trees(doomed)

    def kill_background(self, *, idle_too: bool = False) -> None:
        """Kill everything whose command has ended; `idle_too`: and all workers."""
        self.free_held()
        tree = _count_threads()[1] if self._resting else {}
        for one in self._resting:
            if _runs_more(one, tree):
                self.kill(one)
        for one in self._busy:
            if one.listener is None:
                self.kill(one)
        if idle_too:
            for pid in self._known():
                self.kill(pid)
        # At once: until the end of this round of the loop, a worker may get another job.
        self._kill_doomed()
        self.orphans.kill()

    def _known(self) -> set[int]:
        everyone = [*self.spares.all(), *self._busy, *self._resting, self.held]
        return {pid for one in everyone if one for pid in (one.pid, one.main) if pid}

    def _notice_child(self, stopped: bool) -> None:
        if stopped:
            self.wake()
        elif not self._lineage:
            self._looking.plan()

    def _cool(self) -> None:
        self.free_held()
        in_use = self._resting or any(one.is_python for one in self._busy)
        self.spares.give_back(python=not in_use)


def _runs_more(resting: WorkerHandle, tree: dict[int, int]) -> bool:
    """Return whether more than the notebook itself runs, whose pid may not be reported yet."""
    return len(processes.find_descendants([resting.pid or -1], tree)) > 1


class SpareWorkers:
    """Workers without a job, and the warm interpreter; ended when unused for a while."""

    def __init__(
        self,
        loop: Loop,
        env: dict[str, str],
        on_message: Callable[[WorkerHandle], None],
        cool: Callable[[], None],
    ) -> None:
        """Call `on_message` when a worker has sent one, `cool` when unused ones are to be ended."""
        self._loop, self._on_message, self._cool = loop, on_message, cool
        self._idle: dict[bool, list[WorkerHandle]] = {False: [], True: []}
        self.interpreter = PythonForkServer(env, self._watch, self._cool_later)
        self._cooling: Timer | None = None

    def all(self) -> list[WorkerHandle]:
        warm = self.interpreter.worker
        return [*self._idle[False], *self._idle[True], *([warm] if warm else [])]

    def take(self, *, is_python: bool) -> WorkerHandle:
        idle = self._idle[is_python]
        return idle.pop() if idle else self._new(is_python=is_python)

    def put_back(self, freed: WorkerHandle) -> None:
        if len(self._idle[freed.is_python]) < _MOST_IDLE:
            self._idle[freed.is_python].append(freed)
        else:
            self.forget(freed)
        self._cool_later()

    def prepare(self, *, is_python: bool = False) -> None:
        try:
            self._idle[is_python] = self._idle[is_python] or [self._new(is_python=is_python)]
        except OSError:
            # No process is left, or the chat's start-up files end Python: the next call reports it.
            return

    def _new(self, *, is_python: bool) -> WorkerHandle:
        if is_python:
            return self.interpreter.start_python_worker()
        mine, theirs = native.make_socket_pair()
        pid = os.fork()
        if pid == 0:
            self._be_worker(theirs)
        theirs.close()
        return self._watch(WorkerHandle(pid, mine, is_python=False))

    def _be_worker(self, control: native.Socket) -> None:
        """Serve jobs and never return: objects of the parent's frames stay alive, unused."""
        try:
            self._loop.close_in_child()
            os.dup2(control.fileno(), native.CONTROL_FD, inheritable=False)
            os.closerange(native.CONTROL_FD + 1, native.MOST_FDS)
            processes.die_with_parent()
            worker.serve(native.Socket(fileno=native.CONTROL_FD), programs.spawn)
        finally:
            os._exit(0)

    def _watch(self, new: WorkerHandle) -> WorkerHandle:
        self._loop.watch(new.control.fileno(), READ, lambda _events: self._on_message(new))
        return new

    def forget(self, gone: WorkerHandle) -> None:
        """Close the worker's socket, at which it ends."""
        self._loop.unwatch(gone.control.fileno())
        gone.control.close()

    def lose(self, gone: WorkerHandle) -> None:
        self.forget(gone)
        if gone in self._idle[gone.is_python]:
            self._idle[gone.is_python].remove(gone)
        if gone is self.interpreter.worker:
            self.interpreter.worker = None

    def _cool_later(self) -> None:
        if self._cooling:
            self._cooling.cancel()
        self._cooling = self._loop.call_later(_WARM_S, self._cool)

    def give_back(self, *, python: bool) -> None:
        """End all workers without a job, and with `python` the interpreter.

        A new worker replaces them: it shares more memory with pid 1 than one forked earlier.
        """
        unused = self._idle[True] + self._idle[False]
        if python and self.interpreter.worker:
            unused.append(self.interpreter.worker)
            self.interpreter.worker = None
        self._idle = {False: [], True: []}
        for one in unused:
            self.forget(one)
        self.prepare()


class Orphans:
    """Children of pid 1 that belong to no worker: they are killed, unless adopted."""

    def __init__(
        self,
        loop: Loop,
        known: Callable[[], set[int]],
        notice: Callable[[bool], None],
        lineage: bool,
    ) -> None:
        """`known`: pids of workers and commands. `notice`: a child has stopped (True) or ended."""
        self._known, self._notice, self._lineage = known, notice, lineage
        # Commands whose worker was killed, and what to call at their end.
        self.adopted: dict[int, Callable[[int], None]] = {}
        # Wait statuses of the last 64 children that ended unawaited.
        self.reaped: dict[int, int] = {}
        self._looked_at = 0.0
        self._killing = DeferredAction(loop, _TIDY_S, self._kill_all)

    def kill_soon(self) -> None:
        """Kill what is left by a worker or an adopted command that has just ended."""
        if self._lineage:
            self._killing.plan()

    def _kill_all(self) -> None:
        if self.kill():
            self.kill_soon()

    def kill(self, born_since: float = 0.0) -> int:
        """Kill the orphans; return how many there were.

        Without subreapers, only those that began at `born_since` (ticks) or later.
        """
        lost = self.find()
        if not self._lineage:
            lost = [
                pid for pid in lost if born_since <= processes.read_start_ticks(pid) < float("inf")
            ]
        if lost:
            # An ending one may still be the parent of a command that has outlived it.
            processes.kill_trees(lost, self.adopted)
            self._looked_at = 0.0
        return len(lost)

    def _newest_leader(self, born_since: float) -> int | None:
        """Return the one orphan that leads a session and began at `born_since` (ticks) or later.

        Every command leads its own session; None when there is not exactly one.
        """
        self._looked_at = 0.0
        found = [
            pid
            for pid in self.find()
            if processes.read_session(pid) == pid and processes.read_start_ticks(pid) >= born_since
        ]
        # It may have ended already. Statuses by SIGKILL are of workers killed with its own.
        ended = [pid for pid, status in self.reaped.items() if status != signal.SIGKILL]
        return found[0] if len(found) == 1 else ended[-1] if ended and not found else None

    def find(self) -> list[int]:
        """Return the orphans; none if none were seen just now, as many ends at once ask this."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return []
        # A command whose worker has just died is known, too: that death is not handled yet.
        known = self._known() | set(self.adopted)
        me, tree = os.getpid(), processes.map_parents()
        lost = [pid for pid, parent in tree.items() if parent == me and pid not in known]
        self._looked_at = 0.0 if lost else time.monotonic()
        return lost

    def adopt(self, pid: int | None, ended: Callable[[int], None], born_since: float) -> int | None:
        """Wait from pid 1 for a command whose worker was killed; return its pid.

        Without a pid, look for it; None when it cannot be told.
        """
        pid = pid or self._newest_leader(born_since)
        if pid is None:
            return None
        if pid in self.reaped:
            ended(self.reaped.pop(pid))
        elif os.path.exists(f"/proc/{pid}"):
            self.adopted[pid] = ended
        else:
            ended(signal.SIGKILL)
        return pid

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._notice(True)
            elif ended := self.adopted.pop(pid, None):
                ended(status)
                self.kill_soon()
            else:
                # It may be asked for a moment later, when the death of its worker is handled.
                self.reaped[pid] = status
                while len(self.reaped) > 64:
                    del self.reaped[next(iter(self.reaped))]
                self._notice(False)


class OomCounter:
    """Counts the kernel's kills for lack of memory in this sandbox."""

    def __init__(self) -> None:
        there = (path for path in _FILES if os.access(path, os.R_OK))
        self._file = os.open(next(there, os.devnull), os.O_RDONLY | os.O_CLOEXEC)

    def count_kills(self) -> int:
        _, _, count = os.pread(self._file, 4096, 0).partition(b"oom_kill ")
        return int(count.split()[0]) if count else 0


def describe_processes(pids: Iterable[int]) -> dict[str, Any]:
    """Describe the first of these processes, and count them."""
    found = sorted(pids)
    named = [{"pid": pid, "command": _read_command_line(pid)} for pid in found[:MOST_NAMED]]
    return {"background": named, "background_total": len(found)}


def _read_command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/comm", "rb") as name:
            words = line.read(4 * _MOST_COMMAND).replace(b"\0", b" ").strip() or name.read().strip()
    except OSError:
        return ""
    is_ours = worker.BASH.encode() in words
    return "bash (a subshell)" if is_ours else words.decode("utf-8", "replace")[:_MOST_COMMAND]


class ProcessLimit:
    """The room below the limit of processes; `limit` 0: none."""

    def __init__(self, limit: int) -> None:
        self._most = limit - min(_FREE, limit // _SHARE)
        self._dying: set[int] = set()
        self._until = 0.0
        # What was seen at the last scan with much room, and until when that counts.
        self._roomy: tuple[frozenset[int], float] = frozenset(), 0.0

    def look(self, roots: Collection[int]) -> tuple[bool, int | None]:
        """Return whether a call may start; if not, which of `roots` to kill with its tree.

        None while the tree named before is still dying.
        """
        seen, roomy_until = self._roomy
        is_roomy = seen == frozenset(roots) and time.monotonic() < roomy_until
        if self._most <= 0 or not (roots or self._dying) or is_roomy:
            return True, None
        threads, tree = _count_threads()
        self._dying &= threads.keys()
        if self._dying and time.monotonic() < self._until:
            return False, None
        trees = {root: pids for root in roots if (pids := processes.find_descendants([root], tree))}
        if sum(threads.values()) <= self._most or not trees:
            much = sum(threads.values()) <= self._most // 2
            self._roomy = frozenset(roots), time.monotonic() + _ROOMY_S * much
            return True, None
        largest = max(trees, key=lambda root: sum(threads[pid] for pid in trees[root]))
        self._dying, self._until = trees[largest], time.monotonic() + _DYING_S
        return False, largest


def _count_threads() -> tuple[dict[int, int], dict[int, int]]:
    """Return threads and parent by pid, zombies included: they count against the limit."""
    threads, tree = {}, {}
    for pid, fields in processes.read_stats():
        # Fields 4 and 20 of proc(5); the list begins at 3.
        tree[pid], threads[pid] = int(fields[1]), int(fields[17])
    return threads, tree
