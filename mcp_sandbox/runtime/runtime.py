"""Typed calls to one runner: code, commands and shells here, file operations in `files`."""

import re
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Literal, cast, get_args

from anyio import CancelScope

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import Background, ExecResult, Language, RunnerStatus, TerminalEnd
from mcp_sandbox.runtime import processes
from mcp_sandbox.runtime.call import JsonObject, read_background, read_small_number
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.telemetry.calls import ended_span

# Why a sandbox does not end: other servers, calls, background processes; "" if it ends.
Refusal = Literal["users", "calls", "background", ""]
OnOutput = Callable[[str, bytes], Awaitable[None]]
Show = Callable[[bytes], Awaitable[None]]

NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
"""What a shell or a notebook may be called."""


class Runtime:
    """The runner of one sandbox, over one channel.

    Unless files `may_grow`, the kernel stops commands from making any file longer. Any call may
    raise SandboxGone: the sandbox died or does not answer.
    """

    def __init__(self, channel: Channel, *, keep_bytes: int, may_grow: bool = True) -> None:
        self.files, self.processes = Files(channel), processes.RuntimeProcesses(channel)
        self.hello = channel.hello
        self.aclose, self.wait_broken = channel.aclose, channel.wait_broken
        self._channel = channel
        self._keep_bytes = keep_bytes
        self._may_grow = may_grow
        self._stop: CancelScope | None = None
        self._memory = 0

    def bounded(self, stop: CancelScope | None = None, *, may_grow: bool) -> "Runtime":
        """Return the runner for one call, which is killed, and returns, if `stop` is cancelled."""
        keep_bytes = self._keep_bytes if may_grow else 0
        bounded = Runtime(self._channel, keep_bytes=keep_bytes, may_grow=may_grow)
        bounded._stop = stop
        return bounded

    def capped(self, memory_mb: float | None, output_mb: float | None) -> "Runtime":
        """Return the runner for one call with limits of its own, below those that hold for all."""
        if not all(each is None or each > 0 for each in (memory_mb, output_mb)):
            raise InvalidArgument("memory_mb and output_mb must be above 0")
        memory, output = (int((each or 0) * 2**20) for each in (memory_mb, output_mb))
        keep_bytes = min(self._keep_bytes, output or self._keep_bytes)
        capped = Runtime(self._channel, keep_bytes=keep_bytes, may_grow=self._may_grow)
        capped._stop, capped._memory = self._stop, memory
        return capped

    @property
    def broken(self) -> bool:
        """Whether no further call can succeed."""
        return self._channel.broken is not None

    @property
    def silent(self) -> bool:
        """Whether it is broken because the runner does not answer: other servers will see this."""
        return self._channel.silent

    @property
    def background(self) -> Background:
        """The processes that commands left running; the runner reports every change."""
        return self._channel.background

    def watch_background(self, changed: Callable[[], object]) -> None:
        """Have the reader of the channel call `changed` at every change of it."""
        self._channel.on_background = changed

    async def status(
        self, *, stop_background: bool = False, timeout_s: float = processes.LATE_S
    ) -> RunnerStatus:
        """Return the state; `stop_background` then kills what runs there, if no call is under way.

        If nothing does, it kills all other processes; `background` names notebooks then.
        """
        args = {"stop_background": stop_background}
        status = (await self._channel.call("status", args, timeout_s=timeout_s)).result
        async with processes.checked_answers(self._channel):
            connections, calls = int(status["connections"]), int(status["calls"])
            # A runner from before an upgrade stops nothing, and does not say so.
            idle_s, stopped = float(status["idle_s"]), bool(status.get("stopped"))
            return RunnerStatus(connections, calls, read_background(status), idle_s, stopped)

    async def retire(self, *, background_too: bool, leaving: bool = False) -> Refusal:
        """End the sandbox unless it is in use; return why not, or "" if it ends.

        Background processes also keep it, unless `background_too`. With `leaving` this server no
        longer counts as a user if the sandbox goes on for others: close the channel then.
        """
        args = {"background_too": background_too, "leaving": leaving}
        answer = (await self._channel.call("retire", args, timeout_s=processes.LATE_S)).result
        async with processes.checked_answers(self._channel):
            if answer.get("why") not in get_args(Refusal):
                raise ValueError("why it does not end")
        return cast("Refusal", answer["why"])

    async def run_code(  # noqa: PLR0913 - what code can be given
        self,
        code: str,
        language: Language,
        *,
        notebook: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Run code in a new process of its language, or in a notebook; the rest as in `exec`.

        Raises:
            Unsupported: the language is not installed in this sandbox.
            Busy: the notebook runs another cell, or there are too many notebooks.
        """
        if language not in get_args(Language):
            raise InvalidArgument(f"language is one of {', '.join(get_args(Language))}")
        args: JsonObject = {"language": language, "notebook": notebook, "timeout_s": timeout_s}
        args["is_script"] = language == "bash"
        return await self._run(args, code.encode(), env=env, on_output=on_output, leave=leave)

    async def exec(  # noqa: PLR0913 - what a command can be given
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        shell: str | None = None,
        timeout_s: float | None = None,
        until: str | None = None,
        tty: bool = False,
        on_output: OnOutput | None = None,
        take: Show | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Run a bash command line, or a program with its arguments and no shell.

        After `timeout_s` it is killed. When `leave` is cancelled, or `until` is in its output, the
        call returns and the command goes on. `on_output` gets ("stdout" | "stderr", bytes) live,
        with gaps if it is slow. With `tty` stdout is what the command writes to its terminal.

        `take` gets all of stdout, in order; the command is paused while `take` runs, and the
        result comes after the last byte and has no stdout. If it raises, the command is killed.

        A named `shell` goes on where its last command ended; see `runner/calls/shell`.

        Raises:
            NotFound: `cwd` cannot be used.
            InvalidArgument: `shell` is not a valid name, or is used with a list or `tty`; or
                `take` is used with `tty`, `until`, `on_output` or `leave`.
            Busy: `shell` runs another command.
        """
        args: JsonObject = {"timeout_s": timeout_s, "until": until, "tty": tty}
        if tty and (stdin or shell):
            raise InvalidArgument("tty takes no stdin and no shell: leave these out, or tty")
        if take:
            if tty or until or on_output or leave:
                raise InvalidArgument("take excludes tty, until, on_output, leave, wait_s: drop it")
            args["take"] = True
        if shell is not None:
            if not NAME.fullmatch(shell):
                raise InvalidArgument("shell takes 1 to 32 letters, digits, '.', '_' or '-'")
            if not isinstance(command, str):
                raise InvalidArgument("shell takes a command line, not a list")
            args["shell"] = shell
        if cwd:
            args["cwd"] = cwd
        code = None
        if isinstance(command, str):
            args["language"], code = "bash", command.encode()
        else:
            args["argv"] = list(command)
        sink: OnOutput | None = (lambda _, data: take(data)) if take else on_output
        return await self._run(args, code, stdin, env=env, on_output=sink, leave=leave)

    async def terminal(
        self, frames: AsyncIterable[bytes], show: Show, *, args: Mapping[str, object]
    ) -> TerminalEnd:
        """Run a shell for a person; it ends at the latest with `frames` (wire/terminal_frames).

        `args`: its `env`, whether it has a `tty`, and a `command` to run instead of a shell.

        Raises Unsupported: the sandbox has no shell.
        """
        job: JsonObject = {**args, "grow": self._may_grow}
        reply = await self._channel.call(
            "terminal", job, body=frames, timeout_s=float("inf"), sink=lambda _, data: show(data)
        )
        async with processes.checked_answers(self._channel):
            code, number = (
                read_small_number(reply.result[name]) for name in ("exit_code", "signal")
            )
        return TerminalEnd(exit_code=code, signal=number)

    async def _run(
        self,
        args: JsonObject,
        code: bytes | None,
        stdin: bytes = b"",
        *,
        env: Mapping[str, str] | None,
        on_output: OnOutput | None,
        leave: CancelScope | None,
    ) -> ExecResult:
        limit_s = args["timeout_s"]
        args |= {"keep_bytes": self._keep_bytes, "grow": self._may_grow, "live": bool(on_output)}
        args["memory"] = self._memory
        # `take` may still be reading long after the command's end.
        endless = limit_s is None or "take" in args
        if env:
            args["env"] = dict(env)
        if code is not None:
            args["code_bytes"] = len(code)
        reply = await self._channel.call(
            "run",
            args,
            body=(code or b"") + stdin,
            timeout_s=float("inf") if endless else limit_s + processes.LATE_S,
            sink=on_output,
            stop=self._stop,
            leave=leave,
        )
        async with processes.checked_answers(self._channel):
            result = processes.read_exec_result(reply)
        ended_span("runner run", result.duration_ms)
        return result
