"""Typed calls to one runner: code, commands and shells here, file operations in `files`."""

import signal
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from io import BytesIO
from typing import Literal, cast, get_args

from anyio import CancelScope

from mcp_sandbox.errors import InvalidArgument, SandboxGone
from mcp_sandbox.models import Background, ExecResult, Language, RunnerStatus, TerminalEnd
from mcp_sandbox.runtime.calls import JsonObject, Reply, background_of
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.telemetry.calls import ended_span

# Why a sandbox does not retire: other servers, calls, or what runs in the background; or it does.
Refusal = Literal["users", "calls", "background", ""]
OnOutput = Callable[[str, bytes], Awaitable[None]]
Show = Callable[[bytes], Awaitable[None]]

# The runner enforces the time limit; one that is this late is taken for dead.
_LATE_S = 5.0
# Who does not answer this is ended with all that runs in it: so a slow machine gets its time.
_RETIRE_S = 12.0
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
_COUNTED = ("created", "changed", "deleted")
_WHY = {"timeout": "it ran longer than its time limit", "cancelled": "the call was cancelled"}


class Runtime:
    """The runner of one sandbox, over one channel.

    Unless files `may_grow`, the kernel lets none become longer that a command writes to. Any call
    may raise SandboxGone: it died, or does not answer.
    """

    def __init__(self, channel: Channel, *, keep_bytes: int, may_grow: bool = True) -> None:
        self.files = Files(channel)
        self.hello = channel.hello
        self.aclose, self.wait_broken = channel.aclose, channel.wait_broken
        self._channel = channel
        self._keep_bytes = keep_bytes
        self._may_grow = may_grow
        self._stop: CancelScope | None = None

    def bounded(self, stop: CancelScope | None = None, *, may_grow: bool) -> "Runtime":
        """The same runner for one call, which is killed, and answers, when `stop` is cancelled."""
        keep_bytes = self._keep_bytes if may_grow else 0
        bounded = Runtime(self._channel, keep_bytes=keep_bytes, may_grow=may_grow)
        bounded._stop = stop
        return bounded

    @property
    def broken(self) -> bool:
        """No further call can succeed."""
        return self._channel.broken is not None

    @property
    def silent(self) -> bool:
        """It is broken because the runner does not answer, which others will find, too."""
        return self._channel.silent

    @property
    def background(self) -> Background:
        """What commands have left running, as the runner last said; it tells every change."""
        return self._channel.background

    async def status(self, *, timeout_s: float = _LATE_S) -> RunnerStatus:
        """Who and what uses the sandbox now."""
        said = (await self._channel.call("status", {}, timeout_s=timeout_s)).result
        try:
            connections, calls = int(said["connections"]), int(said["calls"])
            return RunnerStatus(connections, calls, background_of(said), float(said["idle_s"]))
        except _MALFORMED as exc:
            raise await self._nonsense(exc) from exc

    async def retire(self, *, background_too: bool, leaving: bool = False) -> Refusal:
        """End the sandbox unless somebody else uses it; why not, or "" when it ends.

        What runs in the background keeps it, too, unless `background_too`. With `leaving` we do
        not count any more once it goes on for other servers: hang up then.
        """
        args = {"background_too": background_too, "leaving": leaving}
        said = (await self._channel.call("retire", args, timeout_s=_RETIRE_S)).result
        if said.get("why") not in get_args(Refusal):
            raise await self._nonsense(ValueError("why it does not end"))
        return cast("Refusal", said["why"])

    async def run_code(
        self,
        code: str,
        language: Language,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run code in a fresh process of its language; `on_output` as in `exec`.

        Raises:
            Unsupported: the language is not installed in this sandbox.
        """
        args: JsonObject = {"language": language, "timeout_s": timeout_s}
        return await self._run(args, code.encode(), env=env, on_output=on_output)

    async def exec(  # noqa: PLR0913 - one way to run a command, with all that it may be given
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        tty: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a bash command line, or a program with its arguments without any shell.

        With `tty` it runs on a terminal, and what that is sent is its stdout. `on_output` gets
        ("stdout" | "stderr", bytes) live, with gaps when it is slow.

        Raises:
            NotFound: `cwd` cannot be used.
            InvalidArgument: `tty` with `stdin`.
        """
        if tty and stdin:
            raise InvalidArgument("a terminal takes no stdin: leave stdin out, or tty")
        args: JsonObject = {"timeout_s": timeout_s, "tty": tty}
        if cwd:
            args["cwd"] = cwd
        code = None
        if isinstance(command, str):
            args["language"], code = "bash", command.encode()
        else:
            args["argv"] = list(command)
        return await self._run(args, code, stdin, env=env, on_output=on_output)

    async def terminal(
        self, frames: AsyncIterable[bytes], show: Show, *, args: Mapping[str, object]
    ) -> TerminalEnd:
        """Let a person use a shell; it ends at the latest with `frames` (runner/frames.py).

        `args`: its `env`, whether it has a `tty`, and the `command` to run instead.

        Raises:
            Unsupported: the sandbox has no shell.
        """
        told: JsonObject = {**args, "grow": self._may_grow}
        reply = await self._channel.call(
            "terminal", told, body=frames, timeout_s=float("inf"), sink=lambda _, data: show(data)
        )
        try:
            code, number = (_small(reply.result[name]) for name in ("exit_code", "signal"))
        except _MALFORMED as exc:
            raise await self._nonsense(exc) from exc
        return TerminalEnd(exit_code=code, signal=number)

    async def _run(
        self,
        args: JsonObject,
        code: bytes | None,
        stdin: bytes = b"",
        *,
        env: Mapping[str, str] | None,
        on_output: OnOutput | None,
    ) -> ExecResult:
        args |= {"keep_bytes": self._keep_bytes, "grow": self._may_grow, "live": bool(on_output)}
        if env:
            args["env"] = dict(env)
        if code is not None:
            args["code_bytes"] = len(code)
        reply = await self._channel.call(
            "run",
            args,
            body=(code or b"") + stdin,
            timeout_s=args["timeout_s"] + _LATE_S,
            sink=on_output,
            stop=self._stop,
        )
        try:
            result = _result(reply)
        except _MALFORMED as exc:
            raise await self._nonsense(exc) from exc
        ended_span("runner run", result.duration_ms)
        return result

    async def _nonsense(self, exc: Exception) -> SandboxGone:
        """No runner of ours says such a thing: nothing of it is believed any more."""
        await self._channel.aclose()
        return SandboxGone(f"the sandbox sent a result that makes no sense: {exc}")


def _small(value: object) -> int | None:
    if value is None or (isinstance(value, int) and 0 <= value <= 255):
        return value
    raise TypeError("no exit code")


def _result(reply: Reply) -> ExecResult:
    said, body = reply.result, BytesIO(reply.body)
    out_head, out_tail, err_head, err_tail = (body.read(int(size)) for size in said["sizes"])
    out_total, err_total = (int(total) for total in said["totals"])
    number, counts, changed = said["signal"], said.get("counts"), said["changed"]
    return ExecResult(
        stdout=_text(out_head, out_tail, out_total),
        stderr=_text(err_head, err_tail, err_total),
        exit_code=None if said["exit_code"] is None else int(said["exit_code"]),
        signal=None if number is None else _signal_name(int(number)),
        duration_ms=int(said["duration_ms"]),
        timed_out=said["why"] == "timeout",
        out_of_memory=bool(said["out_of_memory"]),
        killed_because=_WHY.get(str(said["why"])),
        truncated=len(reply.body) < out_total + err_total,
        stdout_bytes=out_total,
        stderr_bytes=err_total,
        output_file=None if said["output_file"] is None else str(said["output_file"]),
        changed_files=None if changed is None else tuple(str(name) for name in changed[:20]),
        file_counts=counts and dict(zip(_COUNTED, map(int, counts), strict=True)),
        made_room=background_of(said["made_room"]) if "made_room" in said else Background(),
    )


def _text(head: bytes, tail: bytes, total: int) -> str:
    """Whole output, or both ends with a line between them that says how much is left out."""
    missing = total - len(head) - len(tail)
    if missing <= 0:
        return (head + tail).decode("utf-8", "replace")
    start, end = head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
    return f"{start}\n[... {missing:,} bytes left out ...]\n{end}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
