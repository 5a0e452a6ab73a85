"""Calls that a worker does: commands and code, killed as whole trees, and file operations."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner import processes
from mcp_sandbox.runner.loop import Inflow, Tap, pipe, widen
from mcp_sandbox.runner.native import close, signal
from mcp_sandbox.runner.pool import described
from mcp_sandbox.runner.protocol import WINDOW, OpError
from mcp_sandbox.runner.worker import BASH, remove_code, watched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from mcp_sandbox.runner.interpreter import Worker
    from mcp_sandbox.runner.keyboard import Keyboard
    from mcp_sandbox.runner.loop import Loop, Timer
    from mcp_sandbox.runner.pool import Pool
    from mcp_sandbox.runner.server import Reply
    from mcp_sandbox.runner.standby import Standby

HALF = 32 * 1024
# Results are cut at about 30 kB of text: from here on the whole is worth keeping.
KEEP_OVER = 20_000
KEPT_TOTAL = 256 * 1024 * 1024
KEPT_SECONDS = 7 * 24 * 3600
_FOLDER = ".mcp-sandbox"
_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.cjs")
_NODE = ["node", "--input-type=module", "--require", _PRELUDE, "-"]
_ARGV = {"bash": ["bash", "-c", BASH], "javascript": _NODE, "python": ["python3"]}
_LIVE_WINDOW = 256 * 1024
_LITTLE, _GATHER_S = 4096, 0.002
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


class Stream:
    """Head and tail of one stream."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HALF - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data[-HALF:]
            if len(self.tail) > 2 * HALF:
                del self.tail[:-HALF]

    def ends(self) -> tuple[bytes, bytes]:
        return bytes(self.head), bytes(self.tail[-HALF:])


class Capture:
    """Both streams of one command, and the file that keeps them in order of arrival."""

    def __init__(self, workspace: str, name: str, limit: int) -> None:
        self.streams = {"stdout": Stream(), "stderr": Stream()}
        self._folder = os.path.join(workspace, _FOLDER, "output")
        self._path = os.path.join(self._folder, name + ".txt")
        self._left = limit
        self._fd = -1
        self._tried = limit == 0

    def add(self, name: str, data: bytes) -> None:
        before = sum(stream.total for stream in self.streams.values())
        if not self._tried and before + len(data) > KEEP_OVER:
            self._open()
        if self._fd >= 0:
            self._keep(data)
        self.streams[name].add(data)

    def close(self) -> str | None:
        """The path of the kept file, or None when there is none."""
        if self._fd < 0:
            return None
        os.close(self._fd)
        self._fd = -1
        return self._path

    def _open(self) -> None:
        """Begin the file with what was printed so far: little, so it is whole in the heads."""
        self._tried = True
        try:
            _prepare(self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
        except OSError:
            # A full or unwritable workspace: the head and tail must do; the result names no file.
            return
        for stream in self.streams.values():
            self._keep(stream.head)

    def _keep(self, data: bytes | bytearray) -> None:
        piece = data[: self._left]
        try:
            written = os.write(self._fd, piece) if piece else 0
        except OSError:
            self._left = 0
            return
        self._left = self._left - written if written == len(piece) else 0


def _prepare(folder: str) -> None:
    """Make the folder, keep it out of version control, and delete what is old or too much."""
    os.makedirs(folder, exist_ok=True)
    ignore = os.path.join(os.path.dirname(folder), ".gitignore")
    if not os.path.lexists(ignore):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(ignore, flags, 0o644)
        os.write(fd, b"*\n")
        os.close(fd)
    kept = 0
    oldest = time.time() - KEPT_SECONDS
    files = []
    with os.scandir(folder) as entries:
        # At most 1,000 files: user code may have put anything there.
        for entry, _ in zip(entries, range(1000)):
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, entry.path))
    for modified, size, path in sorted(files, reverse=True):
        kept += size
        if kept > KEPT_TOTAL or modified < oldest:
            os.unlink(path)


class Command:
    """One command on its way."""

    def __init__(
        self, loop: Loop, pool: Pool, standby: Standby, reply: Reply, args: dict[str, Any]
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._standby = standby
        self._reply = reply
        self._args = args
        self._worker: Worker | None = None
        self._main: int | None = None
        self._capture = Capture(args["workspace"], args["name"], args["keep_bytes"])
        self._taps: dict[str, Tap] = {}
        self._inflow: Inflow | None = None
        self._keyboard: Keyboard | None = None
        self._deadline: Timer | None = None
        self._started = 0.0
        self._born_since = 0.0
        self._kills_before = 0
        self._begun = False
        self._why: str | None = None
        self._status: int | None = None
        self._changed: dict[str, Any] = dict.fromkeys(("changed", "counts"))
        self._made_room = described([])
        self._job: dict[str, Any] = {}
        self._is_plain = False
        self._given: list[int] = []
        self._tries_left = _TRIES
        self._live = _LIVE_WINDOW if args.get("live") else 0

    def start(self, code: bytes | None, stdin: bytes, *, more: bool) -> None:
        """Hand the job to a worker; OpError if it cannot be started."""
        self._started = time.monotonic()
        self._born_since = processes.now_ticks()
        self._kills_before = self._pool.memory.kills()
        self._job = self._describe()
        self._deadline = self._loop.later(self._args["timeout_s"], lambda: self._kill("timeout"))
        self._is_plain = self._args.get("language") == "bash" and not (
            stdin or more or self._args.get("tty")
        )
        ready = self._is_plain and self._standby.start(self._job, code or b"", self._hear)
        if ready:
            self._worker, self._born_since = ready.worker, ready.born
            # Until it has begun, another bash may have to be started on the same streams.
            self._given = ready.theirs
            self._listen(*ready.ours)
            return
        self._given = self._open_streams(stdin, more=more)
        if code is not None:
            self._give_code(code)
        self._launch()

    def _launch(self) -> None:
        if self._why:
            self._ended(signal.SIGKILL)
            return
        if not self._pool.has_room(self._note_ending):
            self._loop.later(_SETTLE_S, self._launch)
            return
        self._begun = False
        try:
            seat = self._args.get("language") == "python"
            self._worker = self._pool.start(self._job, self._given, self._hear, seat=seat)
        except OpError as exc:
            self._failed(exc.code, exc.message)

    def _give_code(self, code: bytes) -> None:
        file = os.memfd_create("code")
        os.write(file, code)
        os.lseek(file, 0, os.SEEK_SET)
        if self._args.get("language") == "javascript":
            os.close(self._given[0])
            self._given[0] = file
        else:
            self._given.append(file)

    def _describe(self) -> dict[str, Any]:
        keep = ("cwd", "env", "workspace", "grow", "name", "tty")
        job = {key: self._args.get(key) for key in keep}
        if job["tty"]:
            job["env"] = {"TERM": "xterm-256color", **watched(self._args["env"])}
        language = self._args.get("language")
        argv = _ARGV[language] if language else self._args["argv"]
        # By its path: PATH begins with directories that it would be looked for in first.
        program = "/bin/bash" if language == "bash" else argv[0]
        gated = language == "bash"
        return {**job, "op": "command", "program": program, "argv": argv, "gated": gated}

    def _open_streams(self, stdin: bytes, *, more: bool) -> list[int]:
        if self._args.get("tty"):
            from mcp_sandbox.runner.keyboard import Keyboard  # noqa: PLC0415 - for these alone

            self._keyboard = Keyboard(self._loop)
            self._listen(self._keyboard.master)
            return self._keyboard.theirs
        out_read, out_write = pipe()
        err_read, err_write = pipe()
        self._listen(out_read, err_read)
        if not stdin and not more:
            return [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out_write, err_write]
        theirs, ours = pipe()
        self._inflow = Inflow(self._loop, ours, self._reply.credit)
        self._inflow.add(stdin, more=more)
        return [theirs, out_write, err_write]

    def type(self, text: bytes, key: str | None, still: Callable[[], None]) -> None:
        """Type on the terminal of the command; `still` as in Keyboard. OpError without one."""
        if not self._keyboard:
            raise OpError("invalid", "it has no terminal: only what exec tty=true started has one")
        self._keyboard.type(text, key, still)
        if key == "ctrl-c" and self._main and self._status is None:
            self._keyboard.interrupt(self._main)

    def _listen(self, stdout: int, stderr: int | None = None) -> None:
        self._taps["stdout"] = Tap(self._loop, stdout, lambda data: self._take("stdout", data))
        if stderr is not None:
            self._taps["stderr"] = Tap(self._loop, stderr, lambda data: self._take("stderr", data))

    def feed(self, data: bytes, *, more: bool) -> None:
        if self._inflow:
            self._inflow.add(data, more=more)

    def credit(self, size: int) -> None:
        self._live += size

    def _take(self, name: str, data: bytes) -> None:
        if data:
            self._capture.add(name, data)
            if self._keyboard:
                self._keyboard.shown_at = time.monotonic()
            if len(data) < _LITTLE:
                # A program that prints line by line would wake us for every line.
                self._taps[name].pause()
                self._loop.later(_GATHER_S, self._taps[name].resume)
            # Live output is a courtesy: without credit it is left out, the result has it all.
            if self._live >= len(data):
                self._live -= len(data)
                self._reply.data(name, data)

    def cancel(self) -> None:
        self._kill("cancelled")

    def _kill(self, why: str) -> None:
        if self._why is None and self._status is None:
            self._why = why
            target = self._worker or self._main
            if target:
                self._pool.kill(target)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["e"] == "begin":
            self._begun = True
        elif said["e"] == "pid":
            self._begun = True
            self._main = said["pid"]
            close(self._given)
            if self._why and self._worker:
                self._pool.kill(self._worker)
        elif said["e"] == "exit":
            self._changed = {name: said[name] for name in self._changed}
            self._ended(said["status"])
        elif said["e"] == "fail":
            self._failed(said["code"], said["message"])
        else:
            self._lost()

    def _failed(self, code: str, message: str) -> None:
        if code == "process_limit" and self._tries_left > 0:
            self._make_room()
            return
        self._close()
        self._reply.fail(code, message)

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
        if self._why:
            until = time.monotonic() + _SETTLE_MOST_S
            self._loop.later(_SETTLE_S, lambda: self._settle(until))
        elif self._begun:
            self._changed = dict.fromkeys(self._changed)
            self._take_over(time.monotonic() + _SEEN_WITHIN_S)
        elif self._tries_left > 0:
            # Nothing had begun. Most likely no process was left for it.
            self._tries_left -= _TRIES // 3
            self._make_room()
        else:
            self._failed("unsupported", _NO_START)

    def _take_over(self, until: float) -> None:
        """Wait for a command that lives on without its worker; one just ended shows in a moment."""
        if self._status is not None:
            return
        self._main = self._pool.adopt(self._main, self._ended, self._born_since)
        if self._main is None and time.monotonic() < until:
            self._loop.later(_SETTLE_S, lambda: self._take_over(until))
        elif self._main is None:
            self._failed("cancelled", "the command was cut off as it began; it may have run")

    def _settle(self, until: float) -> None:
        """Answer when nothing of the killed tree is left."""
        if (
            self._status is None
            and self._pool.kill_orphans(self._born_since)
            and time.monotonic() < until
        ):
            self._loop.later(_SETTLE_S, lambda: self._settle(until))
        elif self._status is None:
            self._ended(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._why == "cancelled" or self._worker is None:
            self._changed = dict.fromkeys(self._changed)
        for tap in self._taps.values():
            tap.drain()
        header, payload = self._result(status)
        self._close()
        self._reply.done(header, payload)
        if self._is_plain:
            self._standby.expect(self._job)
        else:
            self._standby.prepare_later()

    def _result(self, status: int) -> tuple[dict[str, Any], bytes]:
        ends = [part for stream in self._capture.streams.values() for part in stream.ends()]
        result = {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "why": self._why,
            "out_of_memory": status != 0
            and self._why is None
            and self._pool.memory.kills() > self._kills_before,
            "duration_ms": round((time.monotonic() - self._started) * 1000),
            "sizes": [len(part) for part in ends],
            "totals": [stream.total for stream in self._capture.streams.values()],
            "output_file": self._capture.close(),
            "made_room": self._made_room,
            **self._changed,
        }
        return result, b"".join(ends)

    def _close(self) -> None:
        """Let go of everything; what still runs in the background writes to nobody."""
        if self._args.get("language") == "python":
            remove_code(self._args["name"])
        close(self._given)
        if self._deadline:
            self._deadline.cancel()
        if self._inflow:
            self._inflow.close()
        if self._keyboard:
            self._keyboard.close()
        for tap in self._taps.values():
            tap.discard() if self._worker else tap.close()
        if self._worker:
            self._worker.listener = None


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
        theirs_in, ours_in = pipe()
        ours_out, theirs_out = pipe()
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
