"""Commands and code, killed as whole process trees, and the calls that wait for them."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.calls.output import Streams
from mcp_sandbox.runner.calls.shell import memory_of, remembering
from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.native import close, signal
from mcp_sandbox.runner.wire.protocol import OpError
from mcp_sandbox.runner.workers.fork_server import FILES, Notebook, WorkerHandle
from mcp_sandbox.runner.workers.pool import describe_processes
from mcp_sandbox.runner.workers.programs import drop_unwatched
from mcp_sandbox.runner.workers.worker import BASH, remove_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from mcp_sandbox.runner.calls.plain import TextSearch
    from mcp_sandbox.runner.kernel.loop import Loop, Timer
    from mcp_sandbox.runner.wire.connection import Reply
    from mcp_sandbox.runner.workers.notebooks import Notebooks
    from mcp_sandbox.runner.workers.pool import Pool
    from mcp_sandbox.runner.workers.warm_shell import WarmShell

_PRELUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.cjs")
_NODE = ["node", "--input-type=module", "--require", _PRELUDE, "-"]
_ARGV = {"bash": ["bash", "-c", BASH], "javascript": _NODE, "python": ["python3"]}
_SHOWN_BYTES, _SHOWN_CHARS = 4096, 80
# Longer than the age up to which the pool reuses a list of all processes.
_SETTLE_S = 0.005
_SETTLE_MOST_S = 5.0
_SEEN_WITHIN_S = 0.2
_TRIES = 20
# Of processes that are ended to make room, so that each tree is named.
_NAMED_OF_EACH, _MOST_NAMED = 5, 20
_TRY_AGAIN_S = 0.05
_WEIGH_S = 0.2
_LIVE_WINDOW = 512 * 1024  # Two pieces: one is read while the other is on its way.
_MOST_UNTIL = 200
_ELSEWHERE = "gave its output to its call; what it has left running prints where it was redirected"
_NO_START = (
    "Python could not be started here. Something under ~/.local that Python loads at start-up may "
    "be broken: see what `python3 -c pass` says, or look at *.pth and usercustomize.py there"
)


class Command:
    """A command. The calls that wait for its end are in `waits`.

    `released`: its call was answered before its end. `told`: a call has reported its end, or will.
    """

    _notebook: Notebook | None = None

    def __init__(
        self,
        loop: Loop,
        pool: Pool,
        notebooks: Notebooks,
        standby: WarmShell,
        note: Callable[[Command], None],
        args: dict[str, Any],
    ) -> None:
        """Call `note` when it begins (which may be refused), outlives its call, and ends."""
        self._loop, self._pool, self._notebooks, self._standby = loop, pool, notebooks, standby
        self._note = note
        self._args = args
        self.id = self.text = ""
        self.waits: list[Wait] = []
        self.released = self.told = self._stopped = self._launched = False
        self.ended_at = float("inf")
        self.shell: str | None = args.get("shell")
        # Until the worker reports more: without it, no state of the shell is saved.
        self._of_shell = ["kept"] if self.shell else []
        self._worker: WorkerHandle | Notebook | None = None
        # The process below which everything runs that the command has started.
        self.main: int | None = None
        # After its end, the worker below which runs on what it has left.
        self.keeper: int | None = None
        self.streams = Streams(loop, args, self.waits)
        self._deadline: Timer | None = None
        self._started = time.monotonic()
        self._born_since, self._kills_before = 0.0, 0
        self._begun = self._is_plain = self._out_of_memory = False
        self._why: str | None = None
        self._status: int | None = None
        self._changed: dict[str, Any] = dict.fromkeys(FILES)
        self._made_room = describe_processes([])
        self._job: dict[str, Any] = {}
        self._tries_left = _TRIES

    @property
    def runs(self) -> bool:
        """Whether it has certainly begun; true also after its end."""
        return self.main is not None or self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._status is not None

    def start(self, code: bytes | None, stdin: bytes, *, more: bool) -> None:
        """Hand the job to a worker; OpError if it cannot be started.

        With `more`, wait for the rest of the input first.
        """
        self._born_since = processes.read_clock_ticks()
        self._kills_before = self._pool.memory.count_kills()
        self._note(self)
        self._job = _describe(self.id, self._args)
        begin = (code or b"")[:_SHOWN_BYTES].decode("utf-8", "replace")
        text = " ".join(self._job["argv"]) if code is None else begin
        self.text = " ".join(text.split())[:_SHOWN_CHARS]
        if (limit_s := self._args["timeout_s"]) is not None:
            self._deadline = self._loop.call_later(limit_s, lambda: self.kill("timeout"))
        if self.shell:
            given, cwd = self._args["given"], self._args["moves"]
            code = remembering(code or b"", memory_of(self.shell), given, cwd=cwd)
        self._is_plain = self._job["gated"] and not (stdin or more or self._job["tty"])
        ready = None
        if self._is_plain and self._pool.has_room(self._note_ending):
            ready = self._standby.start(self._job, code or b"", self._on_message)
        if ready:
            self._worker, self._born_since, self._launched = ready.worker, ready.born, True
            self.streams.use(ready.ours, ready.theirs)
            return
        self.streams.open()
        if code is not None:
            self.streams.give(code, on_stdin=self._args.get("language") == "javascript")
        if more or stdin:
            self.streams.begin_input(stdin)
            self.feed(b"", more=more)
        else:
            self._launch()

    def feed(self, data: bytes, *, more: bool) -> None:
        """Add input; the command starts when its input is complete."""
        try:
            if self.streams.feed(data, more=more):
                self._launch()
        except OpError as exc:
            self._launched = True
            self._failed(exc.code, exc.message)

    def _launch(self) -> None:
        self._launched = True
        if self._why:
            self._ended(signal.SIGKILL)
            return
        self._pool.free_held()
        has_room = self._pool.has_room(self._note_ending)
        if not has_room or self._notebooks.is_ending(self._job["notebook"]):
            self._loop.call_later(_SETTLE_S, self._launch)
            return
        self._begun, given = False, (self._job, self.streams.theirs, self._on_message)
        try:
            if self._job["notebook"]:
                self._worker = self._notebook = self._notebooks.start(*given)
                return
            is_python = self._args.get("language") == "python"
            self._worker = self._pool.start(*given, is_python=is_python)
        except OpError as exc:
            self._failed(exc.code, exc.message)

    def type(self, text: str, key: str | None) -> None:
        """Type on its terminal; OpError if it has none or has ended."""
        keyboard = self.streams.keyboard
        if not keyboard or self.has_ended:
            why = "has ended" if keyboard else "has no terminal: start it with exec tty=true"
            raise OpError("invalid", f"{self.id} {why}")
        if keyboard.type(text.encode("utf-8", "replace"), key) == b"\x03" and self.main:
            keyboard.interrupt(self.main)

    def kill(self, why: str) -> None:
        """Kill it, or what it has left, with all of its tree; `why` appears in the result."""
        if self.keeper:
            self._pool.kill(self.keeper)
        elif self._why is None and self._status is None:
            self._why = why
            target = self._worker or self.main
            if self._notebook and target is self._notebook:
                self._notebooks.interrupt(self._notebook)
            elif target:
                self._pool.kill(target)
            elif not self._launched:
                self._ended(signal.SIGKILL)

    def stop(self, number: int, grace_s: float) -> None:
        """Signal its process group, or all it has left; after `grace_s` kill what is left then."""
        pids = {-self.main} if self.main and not self.has_ended else set[int]()
        if self.keeper:
            pids = processes.find_descendants([self.keeper], processes.map_parents())
        self._stopped = self._stopped or bool(pids)
        gently = pids and number != signal.SIGKILL
        for pid in pids if gently else ():
            processes.send(pid, number)
        self._loop.call_later(grace_s if gently else 0, lambda: self.kill("stopped"))

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["e"] == "begin":
            self._begun = True
        elif message["e"] == "pid":
            self._begun = True
            self.main = message["pid"]
            close(self.streams.theirs)
            if self._why and self._worker:
                self._pool.kill(self._worker)
            if self._args["memory"]:
                self._weigh()
            for wait in [*self.waits]:
                wait.look()
        elif message["e"] == "exit":
            self._changed = {name: message.get(name) for name in FILES}
            self._of_shell = message.get("shell") or []
            self._ended(message["status"])
        elif message["e"] == "fail":
            self._failed(message["code"], message["message"])
        else:
            self._lost()

    def _weigh(self) -> None:
        """Kill it if what it has started holds more memory than this call may; else look again."""
        if self.has_ended or self.main is None:
            return
        roots = [self.main, (self._worker and self._worker.pid) or self.main]
        pids = {self.main, *processes.find_descendants(roots, processes.map_parents())}
        ways, most = (processes.read_memory, processes.read_share_of_memory), self._args["memory"]
        if all(sum(map(read, pids)) > most for read in ways):
            self._out_of_memory = True
            self.kill("memory")
        else:
            self._loop.call_later(_WEIGH_S, self._weigh)

    def _failed(self, code: str, message: str) -> None:
        if code == "process_limit" and self._tries_left > 0:
            self._make_room()
        elif self.released:
            # The caller has its answer already, and learns this end as any other.
            self._ended(signal.SIGKILL)
        else:
            self._close()
            self.told = True
            self._note(self)
            for wait in self.waits:
                wait.fail(code, message)

    def _note_ending(self, pids: Collection[int]) -> None:
        known, more = self._made_room, describe_processes(pids)
        named = known["background"] + more["background"][:_NAMED_OF_EACH]
        total = known["background_total"] + more["background_total"]
        self._made_room = {"background": named[:_MOST_NAMED], "background_total": total}

    def _make_room(self) -> None:
        """Kill what earlier commands left running, and try again."""
        self._tries_left -= 1
        if self._worker:
            self._worker.listener = None
        self._worker = None
        self._note_ending(self._pool.background())
        self._pool.kill_background()
        self._loop.call_later(_TRY_AGAIN_S, self._launch)

    def _lost(self) -> None:
        """Handle the worker's death; if user code killed it, its command may live on."""
        self._worker = None
        if self._status is not None:
            return
        if self._why or (self._notebook and self._begun):
            until = time.monotonic() + _SETTLE_MOST_S
            self._loop.call_later(_SETTLE_S, lambda: self._settle(until))
        elif self._begun:
            self._take_over(time.monotonic() + _SEEN_WITHIN_S)
        elif self._tries_left > 0:
            # Nothing had begun. Most likely the process limit left no room for it.
            self._tries_left -= _TRIES // 3
            self._make_room()
        else:
            self._failed("unsupported", _NO_START)

    def _take_over(self, until: float) -> None:
        """Adopt a command that outlived its worker, or wait briefly for its end to be seen."""
        if self._why or self._status is not None:
            self._lost()
            return
        self.main = self._pool.orphans.adopt(self.main, self._ended, self._born_since)
        if self.main is None and time.monotonic() < until:
            self._loop.call_later(_SETTLE_S, lambda: self._take_over(until))
        elif self.main is None:
            self._failed("cancelled", "the command was cut off as it began; it may have run")

    def _settle(self, until: float) -> None:
        """Answer when nothing of the killed tree is left, or after 5 s."""
        if self._status is not None:
            return
        if self._pool.orphans.kill(self._born_since) and time.monotonic() < until:
            self._loop.call_later(_SETTLE_S, lambda: self._settle(until))
        else:
            self._ended(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        if self._status is not None:
            return
        # Before the status is set: a text found in this last output is answered as still running.
        self.streams.drain()
        self._status, self.ended_at = status, time.monotonic()
        if isinstance(self._worker, WorkerHandle) and self._worker.lingers:
            self.keeper, self._worker.rest_ended = self._worker.pid, self._rest_ended
            self.ended_at = self.ended_at if self.released else float("inf")
        if self._why == "cancelled" or self._worker is None or self.released:
            # While other calls run, no change of a file can be assigned to this command.
            self._changed = dict.fromkeys(FILES)
        if status != 0 and self._why is None:
            self._out_of_memory = self._pool.memory.count_kills() > self._kills_before
        self._close()
        self.told |= bool(self.waits)
        self._note(self)
        self._answer(self.waits)
        self.streams.shrink()
        if self._is_plain:
            self._standby.expect(self._job)
        else:
            self._standby.prepare_later()

    def _rest_ended(self) -> None:
        self.keeper = None
        if not self.released:
            # Its call has told these, and its exit code.
            self._changed, self._of_shell = dict.fromkeys(FILES), []
            self._status, self.ended_at = -1, time.monotonic()
            self._note(self)
        self._answer(self.waits)

    def leave(self, wait: Wait) -> None:
        """Answer a call before the end. If it owns the command, that goes on without an owner."""
        if self._status is not None:
            self.told = True
        elif wait.owns:
            self.released = True
            if self._worker:
                self._worker.released = True
            self.streams.capture.keep()
            self._note(self)
        self._answer([wait])
        self._standby.prepare_later()

    def _answer(self, waits: list[Wait]) -> None:
        if not waits:
            return
        before = self.streams.answer(looked=not all(wait.early for wait in waits))
        for wait in [wait for wait in self.waits if wait in waits]:
            self.waits.remove(wait)
            wait.done(*self._result(None if wait.whole or self._of() == "screen" else before))

    def _result(self, answered: dict[str, int] | None) -> tuple[dict[str, Any], bytes]:
        printed, content = self.streams.printed(answered)
        is_python = self._args.get("language") == "python"
        now = time.monotonic()
        limit = None if self.has_ended else self._deadline
        result = {
            **self.row(),
            "process": self.id if self.released or self._stopped else None,
            "duration_ms": round((min(self.ended_at, now) - self._started) * 1000),
            "left_s": max(0, round(limit.when - now)) if limit else None,
            **printed,
            "figures": self.streams.capture.figures() if self.has_ended and is_python else [],
            "notebook": self._notebook.state if self._notebook else "",
            "made_room": self._made_room,
            "shell": self._of_shell,
            **self._changed,
        }
        return result, content

    def row(self) -> dict[str, Any]:
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
        if self.streams.keyboard:
            return "screen" if self.streams.keyboard.draws else "terminal"
        if self._notebook:
            return f"notebook {self._job['notebook']}"
        return f"shell {self.shell}" if self.shell else ""

    def _close(self) -> None:
        """Release its descriptors; output of what still runs in the background is dropped."""
        if self._args.get("language") == "python":
            remove_code(self._args["name"])
        if self._deadline:
            self._deadline.cancel()
        self.streams.close(read_on=bool(self._worker))
        if self._worker:
            self._worker.listener = None


def _describe(number: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a command for a worker."""
    keep = ("cwd", "env", "workspace", "grow", "name", "kept", "notebook", "tty", "timeout_s")
    job = {"id": number, **{key: args.get(key) for key in (*keep, "memory")}}
    if job["tty"]:
        # Python's own editor of lines indents what is typed once more.
        own = {"TERM": "xterm-256color", "PYTHON_BASIC_REPL": "1"}
        job["env"] = own | drop_unwatched(args["env"])
    language, shell = args.get("language"), args.get("shell")
    argv = _ARGV[language] if language else args["argv"]
    if args.get("is_script"):
        argv = [*argv, os.path.join(args["workspace"], "bash")]
    # A full path: PATH begins with directories that would be searched first.
    program = "/bin/bash" if language == "bash" else argv[0]
    job |= {"shell": memory_of(shell) if shell else None, "gated": language == "bash"}
    return {**job, "op": "command", "program": program, "argv": argv}


class Wait:
    """A call that waits for a command's end, for a text in its output, or for its release.

    The call that started the command owns it: cancelling that call kills the command. If the owner
    is answered before the end, the command goes on without an owner. What an `early` answer has
    contained, which comes while the command begins, is still new to the next.
    """

    _search: TextSearch | None = None

    def __init__(self, reply: Reply, command: Command, op: str, args: dict[str, Any]) -> None:
        self.command = command
        self.owns = op == "run"
        self._op, self._args = op, args
        # Answer with all output, not only what came since the last answer.
        self.whole = bool(args.get("whole"))
        self.met = False
        # Stdout goes to the caller alone, and is read only as fast as the caller takes it.
        self.takes = bool(args.get("take"))
        self._reply = reply
        self._live = _LIVE_WINDOW if self.takes or args.get("live") else 0
        self._released = self.early = False
        if command.has_ended and not command.released and op != "stop":
            raise OpError("invalid", f"{command.id} {_ELSEWHERE}")
        if until := args.get("until"):
            from mcp_sandbox.runner.calls.plain import TextSearch  # noqa: PLC0415 - for these alone

            if len(until) > _MOST_UNTIL:
                raise OpError("invalid", "the text to wait for is too long")
            self._search = TextSearch(until, args.get("text") or "")
        if "text" in args:
            command.type(args["text"], args["key"])
        command.waits.append(self)

    def start(self, body: bytes, *, more: bool) -> None:
        """Start the command with its code and stdin, or watch one that runs. May raise OpError."""
        size = self._args.get("code_bytes")
        if more:
            self._reply.credit(len(body))
        if self._op == "stop":
            self.command.stop(int(self._args["signal"]), float(self._args["grace_s"]))
        elif self._op == "type" and self.command.streams.keyboard and not self._search:
            self.command.streams.keyboard.when_still(self.release)
        if not self.owns:
            self._look_on()
        elif size is None:
            self.command.start(None, body, more=more)
        elif isinstance(size, int) and 0 <= size <= len(body):
            self.command.start(body[:size], body[size:], more=more)
        else:
            raise OpError("invalid", "the code is larger than one frame")

    def _look_on(self) -> None:
        """Search the new output so far; answer at once if the command has ended."""
        for name, data in self.command.streams.held() if self._op != "type" else ():
            if not self._reply.is_open:
                return
            # Output between these two parts was dropped: the text must not be found across the gap.
            if self._search:
                self._search.finds(name, b"\0")
            self.on_output(name, data)
        ends_soon = self._op == "stop" and self.command.keeper
        if self._reply.is_open and self.command.has_ended and not ends_soon:
            self.command.leave(self)

    def feed(self, data: bytes, *, more: bool) -> None:
        self._reply.credit(len(data))
        self.command.feed(data, more=more)

    @property
    def is_full(self) -> bool:
        """Whether the caller must take output before more is read."""
        return self.takes and self._live <= 0

    def credit(self, size: int) -> None:
        was_full = self.is_full
        self._live += size
        if was_full and not self.is_full:
            self.command.streams.read_on("stdout")

    def on_output(self, name: str, data: bytes) -> None:
        if self.takes:
            if name == "stdout":
                self._live -= len(data)
                self._reply.data("body", data)
        # Live output needs no guarantee: without credit it is skipped, the result has it all.
        elif self._live >= len(data):
            self._live -= len(data)
            self._reply.data(name, data)
        if self._search and not self.met:
            self.met = self._search.finds(name, data)
            if self.met:
                self.release()

    def release(self) -> None:
        """Answer as soon as the command certainly runs, without waiting for its end."""
        self._released, self.early = True, not (self.met or self.command.runs)
        self.look()

    def look(self) -> None:
        if self._released and self.command.runs and self in self.command.waits:
            self.command.leave(self)

    def cancel(self) -> None:
        """Kill the command if this call started it; else only stop waiting."""
        if self.owns:
            self.command.kill("cancelled")
        else:
            if self in self.command.waits:
                self.command.waits.remove(self)
            self.fail("cancelled", "the wait was cancelled; what it waited for goes on")

    def done(self, result: dict[str, Any], payload: bytes) -> None:
        self._reply.done({**result, "until_met": self.met}, payload)

    def fail(self, code: str, message: str) -> None:
        self._reply.fail(code, message)
