"""Calls that a worker does: commands and code, killed as whole trees, and file operations."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner import processes
from mcp_sandbox.runner.capture import Capture
from mcp_sandbox.runner.loop import CHUNK, DRAIN, Inflow, Tap, widen
from mcp_sandbox.runner.native import close, signal
from mcp_sandbox.runner.pool import described
from mcp_sandbox.runner.protocol import WINDOW, OpError
from mcp_sandbox.runner.shell import memory_of, remembering
from mcp_sandbox.runner.worker import BASH, remove_code, watched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from mcp_sandbox.runner.cells import Notebook
    from mcp_sandbox.runner.connection import Reply
    from mcp_sandbox.runner.interpreter import Worker
    from mcp_sandbox.runner.keyboard import Keyboard
    from mcp_sandbox.runner.loop import Loop, Timer
    from mcp_sandbox.runner.pool import Pool
    from mcp_sandbox.runner.standby import Standby
    from mcp_sandbox.runner.table import Table
    from mcp_sandbox.runner.waits import Wait

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.cjs")
_NODE = ["node", "--input-type=module", "--require", _PRELUDE, "-"]
_ARGV = {"bash": ["bash", "-c", BASH], "javascript": _NODE, "python": ["python3"]}
_LITTLE, _GATHER_S = 4096, 0.002
_SHOWN_CHARS = 80
_MOST_STDIN = 256 * 1024 * 1024
# Longer than the pool takes a look at all processes for a fresh one.
_SETTLE_S = 0.005
_SETTLE_MOST_S = 5.0
_SEEN_WITHIN_S = 0.2
_TRIES = 20
# Of what makes room: each tree is to be named.
_NAMED_OF_EACH, _MOST_NAMED = 5, 20
_TRY_AGAIN_S = 0.05
_NO_START = (
    "Python could not be started here. Something under ~/.local that Python loads at start-up may "
    "be broken: see what `python3 -c pass` says, or look at *.pth and usercustomize.py there"
)
# Of a file operation that is cancelled: how long it may clean up behind itself.
_GRACE_S = 1.0
_OPERATION_TRIES = 3
_END_BYTES = 16


class Command:
    """One command on its way. Who waits for it is in `waits`; it is told when it ends.

    `released`: its call was answered before its end. `told`: so was somebody when it had ended.
    """

    _notebook: Notebook | None = None

    def __init__(
        self, loop: Loop, pool: Pool, standby: Standby, table: Table, args: dict[str, Any]
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._standby = standby
        self._table = table
        self._args = args
        self.id = self.text = ""
        self.waits: list[Wait] = []
        self.released = self.told = self._stopped = self._launched = False
        self.ended_at = float("inf")
        self.shell: str | None = args.get("shell")
        # Until its worker says more: without it nothing of the command is remembered.
        self._of_shell = ["kept"] if self.shell else []
        self._worker: Worker | Notebook | None = None
        # The process with all that it has started below it.
        self.main: int | None = None
        self._capture = Capture(args["workspace"], args["name"], args["keep_bytes"])
        # How much of each stream was told already.
        self._answered = dict.fromkeys(self._capture.streams, 0)
        self._taps: dict[str, Tap] = {}
        self.keyboard: Keyboard | None = None
        self._stdin: int | None = None
        self._deadline: Timer | None = None
        self._started = time.monotonic()
        self._born_since, self._kills_before = 0.0, 0
        self._begun = self._is_plain = self._out_of_memory = False
        self._why: str | None = None
        self._status: int | None = None
        self._changed: dict[str, Any] = dict.fromkeys(("changed", "counts"))
        self._made_room = described([])
        self._job: dict[str, Any] = {}
        self._given: list[int] = []
        self._tries_left = _TRIES

    @property
    def runs(self) -> bool:
        """It has begun for sure, or has ended."""
        return self.main is not None or self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._status is not None

    def start(self, code: bytes | None, stdin: bytes, *, more: bool) -> None:
        """Hand the job to a worker; OpError if it cannot be started.

        With `more`, as soon as the rest of its input is there.
        """
        self._born_since = processes.now_ticks()
        self._kills_before = self._pool.memory.kills()
        self.id = self._table.enter(self)
        self._job = self._describe()
        begin = (code or b"")[:_LITTLE].decode("utf-8", "replace")
        shown = " ".join(self._job["argv"]) if code is None else begin
        self.text = " ".join(shown.split())[:_SHOWN_CHARS]
        limit_s = self._args["timeout_s"]
        if limit_s is not None:
            self._deadline = self._loop.later(limit_s, lambda: self.kill("timeout"))
        if self.shell:
            given, cwd = self._args["given"], self._args["moves"]
            code = remembering(code or b"", memory_of(self.shell), given, cwd=cwd)
        self._is_plain = self._job["gated"] and not (stdin or more or self._job["tty"])
        ready = None
        if self._is_plain and self._pool.has_room(self._note_ending):
            ready = self._standby.start(self._job, code or b"", self._hear)
        if ready:
            self._worker, self._born_since, self._launched = ready.worker, ready.born, True
            # Until it has begun, another bash may have to be started on the same streams.
            self._given = ready.theirs
            self._listen(*ready.ours)
            return
        self._open_streams()
        if code is not None:
            self._give_code(code)
        if more or stdin:
            self._stdin = _kept(stdin)
            self.feed(b"", more=more)
        else:
            self._launch()

    def feed(self, data: bytes, *, more: bool) -> None:
        """More of its input; it starts when all of it is there, and has it for good."""
        if self._stdin is None:
            return
        if os.fstat(self._stdin).st_size + len(data) > _MOST_STDIN:
            self._launched = True
            self._failed("too_large", "more input than 256 MiB: put it into a file, and read that")
            return
        os.write(self._stdin, data)
        if more:
            return
        os.lseek(self._stdin, 0, os.SEEK_SET)
        os.close(self._given[0])
        self._given[0], self._stdin = _flowing(self._stdin), None
        self._launch()

    def _launch(self) -> None:
        self._launched = True
        if self._why:
            self._ended(signal.SIGKILL)
            return
        self._pool.free_held()
        if not self._pool.has_room(self._note_ending):
            self._loop.later(_SETTLE_S, self._launch)
            return
        self._begun = False
        try:
            if self._job["notebook"]:
                start = self._pool.cells.start
                self._worker = self._notebook = start(self._job, self._given, self._hear)
                return
            seat = self._args.get("language") == "python"
            self._worker = self._pool.start(self._job, self._given, self._hear, seat=seat)
        except OpError as exc:
            self._failed(exc.code, exc.message)

    def _give_code(self, code: bytes) -> None:
        file = _kept(code)
        os.lseek(file, 0, os.SEEK_SET)
        if self._args.get("language") == "javascript":
            os.close(self._given[0])
            self._given[0] = file
        else:
            self._given.append(file)

    def _describe(self) -> dict[str, Any]:
        keep = ("cwd", "env", "workspace", "grow", "name", "notebook", "tty")
        job = {"id": self.id, **{key: self._args.get(key) for key in keep}}
        if job["tty"]:
            job["env"] = {"TERM": "xterm-256color", **watched(self._args["env"])}
        language = self._args.get("language")
        argv = _ARGV[language] if language else self._args["argv"]
        # By its path: PATH begins with directories that it would be looked for in first.
        program = "/bin/bash" if language == "bash" else argv[0]
        gated = language == "bash"
        job["shell"] = memory_of(self.shell) if self.shell else None
        return {**job, "op": "command", "program": program, "argv": argv, "gated": gated}

    def _open_streams(self) -> None:
        if self._args.get("tty"):
            from mcp_sandbox.runner.keyboard import Keyboard  # noqa: PLC0415 - for these alone

            self.keyboard = Keyboard(self._loop)
            self._listen(self.keyboard.master)
            self._given = self.keyboard.theirs
            return
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._listen(out_read, err_read)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._given = [nothing, out_write, err_write]

    def type(self, text: str, key: str | None) -> None:
        """Type on its terminal; OpError where there is none."""
        if not self.keyboard or self.has_ended:
            why = "has ended" if self.keyboard else "has no terminal: start it with exec tty=true"
            raise OpError("invalid", f"{self.id} {why}")
        self.keyboard.type(text.encode("utf-8", "replace"), key)
        if key == "ctrl-c" and self.main:
            self.keyboard.interrupt(self.main)

    def _listen(self, stdout: int, stderr: int | None = None) -> None:
        if self._args.get("take"):
            widen(stdout, CHUNK)
        self._taps["stdout"] = Tap(self._loop, stdout, lambda data: self._take("stdout", data))
        if stderr is not None:
            self._taps["stderr"] = Tap(self._loop, stderr, lambda data: self._take("stderr", data))

    def _take(self, name: str, data: bytes) -> None:
        if data:
            if not (self._args.get("take") and name == "stdout"):
                self._capture.add(name, data)
            if self.keyboard:
                self.keyboard.shown_at = time.monotonic()
            if len(data) < _LITTLE:
                # A program that prints line by line would wake us for every line.
                self._taps[name].pause()
                self._loop.later(_GATHER_S, lambda: self.read_on(name))
            for wait in [*self.waits]:
                wait.hear(name, data)
                if wait.is_full and name == "stdout":
                    self._taps[name].pause()

    def read_on(self, name: str) -> None:
        """Go on reading a stream, unless a caller is to take what was read of it."""
        if name != "stdout" or not any(wait.is_full for wait in self.waits):
            self._taps[name].resume()

    def held(self) -> list[tuple[str, bytes]]:
        """The parts of each stream that are held."""
        streams = self._capture.streams.items()
        return [(name, part) for name, stream in streams for part in stream.parts() if part]

    def kill(self, why: str) -> None:
        """End it with all that it has started."""
        if self._why is None and self._status is None:
            self._why = why
            target = self._worker or self.main
            if self._notebook and target is self._notebook:
                self._pool.cells.interrupt(self._notebook)
            elif target:
                self._pool.kill(target)
            elif not self._launched:
                self._ended(signal.SIGKILL)

    def stop(self, number: int, grace_s: float) -> None:
        """Signal its process group, and after `grace_s` kill what is left of its tree."""
        if self._status is None and self.main and number != signal.SIGKILL:
            self._stopped = True
            processes.send(-self.main, number)
        else:
            grace_s = 0
        worker, job = self._worker, self._job

        def kill_rest() -> None:
            self.kill("stopped")
            if self._status is not None and worker and worker.lingers and worker.job is job:
                self._pool.kill(worker)

        self._loop.later(grace_s, kill_rest)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["e"] == "begin":
            self._begun = True
        elif said["e"] == "pid":
            self._begun = True
            self.main = said["pid"]
            close(self._given)
            if self._why and self._worker:
                self._pool.kill(self._worker)
            for wait in [*self.waits]:
                wait.look()
        elif said["e"] == "exit":
            self._changed = {name: said[name] for name in self._changed}
            self._of_shell = said.get("shell") or []
            self._ended(said["status"])
        elif said["e"] == "fail":
            self._failed(said["code"], said["message"])
        else:
            self._lost()

    def _failed(self, code: str, message: str) -> None:
        if code == "process_limit" and self._tries_left > 0:
            self._make_room()
        elif self.released:
            # Who started it has its answer already, and hears of its end as of any other.
            self._ended(signal.SIGKILL)
        else:
            self._close()
            self._table.leave(self, told=True)
            for wait in self.waits:
                wait.fail(code, message)

    def _note_ending(self, pids: Collection[int]) -> None:
        known, more = self._made_room, described(pids)
        named = known["background"] + more["background"][:_NAMED_OF_EACH]
        total = known["background_total"] + more["background_total"]
        self._made_room = {"background": named[:_MOST_NAMED], "background_total": total}

    def _make_room(self) -> None:
        """Nothing has been started yet: what earlier commands left running gives way."""
        self._tries_left -= 1
        if self._worker:
            self._worker.listener = None
        self._worker = None
        self._note_ending(self._pool.background())
        self._pool.kill_background()
        self._loop.later(_TRY_AGAIN_S, self._launch)

    def _lost(self) -> None:
        """The worker is dead: by our hand, or user code killed it and its command lives on."""
        self._worker = None
        if self._status is not None:
            return
        if self._why or self._notebook:
            until = time.monotonic() + _SETTLE_MOST_S
            self._loop.later(_SETTLE_S, lambda: self._settle(until))
        elif self._begun:
            self._take_over(time.monotonic() + _SEEN_WITHIN_S)
        elif self._tries_left > 0:
            # Nothing had begun. Most likely no process was left for it.
            self._tries_left -= _TRIES // 3
            self._make_room()
        else:
            self._failed("unsupported", _NO_START)

    def _take_over(self, until: float) -> None:
        """Wait for a command that lives on without its worker; one just ended shows in a moment."""
        if self._why or self._status is not None:
            self._lost()
            return
        self.main = self._pool.adopt(self.main, self._ended, self._born_since)
        if self.main is None and time.monotonic() < until:
            self._loop.later(_SETTLE_S, lambda: self._take_over(until))
        elif self.main is None:
            self._failed("cancelled", "the command was cut off as it began; it may have run")

    def _settle(self, until: float) -> None:
        """Answer when nothing of the killed tree is left."""
        if self._status is not None:
            return
        if self._pool.kill_orphans(self._born_since) and time.monotonic() < until:
            self._loop.later(_SETTLE_S, lambda: self._settle(until))
        else:
            self._ended(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        if self._status is not None:
            return
        # Before: who finds its text in the last of it is told that it goes on, and then of its end.
        for tap in self._taps.values():
            # What is to be taken goes beyond its credit now: at most what a pipe may hold, which
            # the other side has room for.
            tap.drain(WINDOW if self._args.get("take") else DRAIN)
        self._status, self.ended_at = status, time.monotonic()
        if self._why == "cancelled" or self._worker is None or self.released:
            # Of what goes on beside other calls nobody knows which of them changed a file.
            self._changed = dict.fromkeys(self._changed)
        if status != 0 and self._why is None:
            self._out_of_memory = self._pool.memory.kills() > self._kills_before
        self._close()
        self._table.leave(self, told=bool(self.waits))
        self._answer(self.waits)
        for stream in self._capture.streams.values():
            stream.shrink()
        if self._is_plain:
            self._standby.expect(self._job)
        else:
            self._standby.prepare_later()

    def leave(self, wait: Wait) -> None:
        """Answer one who waits no longer. When its owner leaves, the command is nobody's."""
        if self._status is not None:
            self.told = True
        elif wait.owns:
            self.released = True
            if self._worker:
                self._worker.released = True
            self._capture.keep()
            self._table.changed()
        self._answer([wait])
        self._standby.prepare_later()

    def _answer(self, waits: list[Wait]) -> None:
        if not waits:
            return
        before = self._answered
        self._answered = {name: each.total for name, each in self._capture.streams.items()}
        for wait in [wait for wait in self.waits if wait in waits]:
            self.waits.remove(wait)
            wait.done(*self._result(None if wait.whole or self.keyboard else before))

    def _result(self, answered: dict[str, int] | None) -> tuple[dict[str, Any], bytes]:
        streams = self._capture.streams
        starts = answered or dict.fromkeys(streams, 0)
        is_python = self._args.get("language") == "python"
        now = time.monotonic()
        limit = None if self.has_ended else self._deadline
        ends = [part for name, each in streams.items() for part in each.since(starts[name])]
        result = {
            **self.row(),
            "process": self.id if self.released else None,
            "duration_ms": round((min(self.ended_at, now) - self._started) * 1000),
            "left_s": max(0, round(limit.when - now)) if limit else None,
            "sizes": [len(part) for part in ends],
            "starts": [starts[name] for name in streams],
            "totals": [stream.total for stream in streams.values()],
            "output_file": self._capture.file,
            "figures": self._capture.figures() if self.has_ended and is_python else [],
            "notebook": self._notebook.state if self._notebook else "",
            "made_room": self._made_room,
            "shell": self._of_shell,
            **self._changed,
        }
        return result, b"".join(ends)

    def row(self) -> dict[str, Any]:
        """What is told of it in a list."""
        status = -1 if self._status is None else self._status
        exited, killed = (status >= 0 and how(status) for how in (os.WIFEXITED, os.WIFSIGNALED))
        return {
            "id": self.id,
            "command": self.text,
            "running": not self.has_ended,
            "seconds": round(min(self.ended_at, time.monotonic()) - self._started, 1),
            "exit_code": os.WEXITSTATUS(status) if exited else None,
            "signal": os.WTERMSIG(status) if killed else None,
            "why": self._why or ("stopped" if self._stopped else None),
            "out_of_memory": self._out_of_memory,
            "of": self._of(),
        }

    def _of(self) -> str:
        if self.keyboard:
            return "terminal"
        if self._notebook:
            return f"notebook {self._job['notebook']}"
        return f"shell {self.shell}" if self.shell else ""

    def _close(self) -> None:
        """Let go of everything; what still runs in the background writes to nobody."""
        if self._args.get("language") == "python":
            remove_code(self._args["name"])
        close(self._given)
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        if self._deadline:
            self._deadline.cancel()
        if self.keyboard:
            self.keyboard.close()
        for tap in self._taps.values():
            tap.discard() if self._worker else tap.close()
        self._capture.close()
        if self._worker:
            self._worker.listener = None


def _kept(data: bytes) -> int:
    """A file without a name that holds this."""
    file = os.memfd_create("given", os.MFD_CLOEXEC)
    os.write(file, data)
    return file


def _flowing(file: int) -> int:
    """A pipe that holds what is in the file, or the file itself where that is too much."""
    theirs, ours = os.pipe()
    widen(ours)
    os.set_blocking(ours, False)
    size, sent = os.fstat(file).st_size, 0
    try:
        sent = os.sendfile(ours, file, 0, size) if size <= WINDOW else 0
    except OSError:
        sent = -1
    os.close(ours)
    if sent == size:
        os.close(file)
        return theirs
    os.close(theirs)
    return file


class Operation:
    """One file operation on its way."""

    def __init__(self, loop: Loop, pool: Pool, reply: Reply) -> None:
        self._loop = loop
        self._reply = reply
        self._pool = pool
        self._worker: Worker | None = None
        self._credit = WINDOW
        self._job: dict[str, Any] = {}
        self._given: list[int] = []
        self._tries_left = _OPERATION_TRIES
        self._ending: dict[str, Any] | None = None
        self._inflow: Inflow | None = None
        self._tap: Tap | None = None

    def start(self, op: str, args: dict[str, Any], body: bytes, *, more: bool) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        if more:
            widen(ours_in)
        widen(ours_out)
        end = os.urandom(_END_BYTES)
        self._inflow = Inflow(self._loop, ours_in, self._reply.credit, end)
        self._tap = Tap(self._loop, ours_out, self._taken)
        self._job = {"op": op, "args": args, "end": end.hex()}
        self._given = [theirs_in, theirs_out]
        self._launch()
        self.feed(body, more=more)
        # Workers forked from now on have it loaded.
        import mcp_sandbox.runner.files.operations  # noqa: F401, PLC0415

    def _launch(self) -> None:
        try:
            self._worker = self._pool.start(self._job, self._given, self._hear)
        except OpError as exc:
            self._end({"e": "fail", "code": exc.code, "message": exc.message})

    def feed(self, data: bytes, *, more: bool) -> None:
        if self._inflow:
            self._inflow.add(data, more=more)

    def credit(self, size: int) -> None:
        """The peer took `size` bytes of the body that comes out."""
        self._credit += size
        if self._tap and self._credit > 0:
            self._tap.resume()

    def cancel(self) -> None:
        """Let it clean up behind itself; kill it if it does not."""
        # Nobody takes the rest any more, nor gives credit for it.
        if self._tap:
            self._tap.close()
        if self._ending:
            self._finish()
            return
        if self._worker and self._worker.pid:
            processes.send(self._worker.pid, signal.SIGTERM)
        self._loop.later(_GRACE_S, self._kill)

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

    def _hear(self, said: dict[str, Any]) -> None:
        if said["e"] == "begin":
            close(self._given)
        elif said["e"] != "lost":
            self._end(said)
        elif self._given and self._tries_left:
            # User code killed the worker before it had begun.
            self._tries_left -= 1
            self._launch()
        else:
            message = "the operation was stopped; look at what it had already done"
            self._end({"e": "fail", "code": "cancelled", "message": message})

    def _end(self, said: dict[str, Any]) -> None:
        if self._ending:
            return
        close(self._given)
        self._ending = said
        if self._worker:
            self._worker.listener = None
        if said["e"] == "fail" and self._tap:
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
