"""Commands and code as calls: started by a worker, watched to the end, killed as whole trees."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner import processes
from mcp_sandbox.runner.native import signal
from mcp_sandbox.runner.output import Capture
from mcp_sandbox.runner.protocol import OpError
from mcp_sandbox.runner.streams import Inflow, Tap, pipe
from mcp_sandbox.runner.worker import remove_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.handle import Worker
    from mcp_sandbox.runner.loop import Loop, Timer
    from mcp_sandbox.runner.pool import Pool
    from mcp_sandbox.runner.reply import Reply
    from mcp_sandbox.runner.standby import Standby

# A line on descriptor 4 says when; without it nothing is run. The command is a file on 3: argv
# has a size limit and shows in process lists.
BASH = (
    "IFS= read -r -u 4 __code || kill -KILL $$; exec 4<&-; SECONDS=0; "
    'IFS= read -r -d "" -u 3 __code; exec 3<&-; eval "unset __code; $__code"'
)
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
_TRY_AGAIN_S = 0.05
_NO_START = (
    "Python could not be started here. Something under ~/.local that Python loads at start-up may "
    "be broken: see what `python3 -c pass` says, or look at *.pth and usercustomize.py there"
)


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
        self._deadline: Timer | None = None
        self._started = 0.0
        self._born_since = 0.0
        self._kills_before = 0
        self._begun = False
        self._why: str | None = None
        self._status: int | None = None
        self._changed: dict[str, Any] = dict.fromkeys(("changed", "counts"))
        self._job: dict[str, Any] = {}
        self._is_plain = False
        self._given: list[int] = []
        self._tries_left = _TRIES
        self._live = _LIVE_WINDOW if args.get("live") else 0

    def start(self, code: bytes | None, stdin: bytes, *, more: bool) -> None:
        """Hand the job to a worker.

        Raises:
            OpError: it cannot be started.
        """
        self._started = time.monotonic()
        self._born_since = processes.now_ticks()
        self._kills_before = self._pool.memory.kills()
        self._job = self._describe()
        self._deadline = self._loop.later(self._args["timeout_s"], self._time_out)
        self._is_plain = self._args.get("language") == "bash" and not stdin and not more
        if self._is_plain and self._start_ready(code or b""):
            return
        self._given = self._open_streams(stdin, more=more)
        if code is not None:
            self._give_code(code)
        self._launch()

    def _start_ready(self, code: bytes) -> bool:
        ready = self._standby.start(self._job, code, self._hear)
        if ready is None:
            return False
        self._worker, self._born_since = ready.worker, ready.born
        # Until it has begun, another bash may have to be started on the same streams.
        self._given = ready.theirs
        self._listen(*ready.ours)
        return True

    def _launch(self) -> None:
        if self._why:
            self._ended(signal.SIGKILL)
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
        keep = ("cwd", "env", "workspace", "grow", "name")
        job = {key: self._args.get(key) for key in keep}
        language = self._args.get("language")
        argv = _ARGV[language] if language else self._args["argv"]
        # By its path: PATH begins with directories that it would be looked for in first.
        program = "/bin/bash" if language == "bash" else argv[0]
        gated = language == "bash"
        return {**job, "op": "command", "program": program, "argv": argv, "gated": gated}

    def _open_streams(self, stdin: bytes, *, more: bool) -> list[int]:
        out_read, out_write = pipe()
        err_read, err_write = pipe()
        self._listen(out_read, err_read)
        if not stdin and not more:
            return [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out_write, err_write]
        theirs, ours = pipe()
        self._inflow = Inflow(self._loop, ours, self._reply.credit)
        self._inflow.add(stdin, more=more)
        return [theirs, out_write, err_write]

    def _listen(self, stdout: int, stderr: int) -> None:
        self._taps = {
            "stdout": Tap(self._loop, stdout, lambda data: self._take("stdout", data)),
            "stderr": Tap(self._loop, stderr, lambda data: self._take("stderr", data)),
        }

    def feed(self, data: bytes, *, more: bool) -> None:
        if self._inflow:
            self._inflow.add(data, more=more)

    def credit(self, size: int) -> None:
        self._live += size

    def _take(self, name: str, data: bytes) -> None:
        if data:
            self._capture.add(name, data)
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

    def _time_out(self) -> None:
        self._kill("timeout")

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
            self._let_go()
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

    def _make_room(self) -> None:
        """Nothing has been started yet: what earlier commands left running gives way."""
        self._tries_left -= 1
        if self._worker:
            self._worker.listener = None
        self._worker = None
        self._pool.kill_background()
        self._loop.later(_TRY_AGAIN_S, self._launch)

    def _let_go(self) -> None:
        while self._given:
            os.close(self._given.pop())

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
            **self._changed,
        }
        return result, b"".join(ends)

    def _close(self) -> None:
        """Let go of everything; what still runs in the background writes to nobody."""
        if self._args.get("language") == "python":
            remove_code(self._args["name"])
        self._let_go()
        if self._deadline:
            self._deadline.cancel()
        if self._inflow:
            self._inflow.close()
        for tap in self._taps.values():
            tap.discard() if self._worker else tap.close()
        if self._worker:
            self._worker.listener = None
