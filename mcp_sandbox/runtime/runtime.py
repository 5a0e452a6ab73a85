"""Typed calls to one runner: code and commands here, file operations in `files`."""

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, cast

from anyio import CancelScope

from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import Background, ExecResult, Language, RunnerHello, RunnerStatus
from mcp_sandbox.runtime.channel import Channel, JsonObject, Reply, background_of
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.runtime.terminal import Terminal
from mcp_sandbox.telemetry.spans import ended_span

# Why a sandbox does not retire: other servers, calls, or what runs in the background; or it does.
Refusal = Literal["users", "calls", "background", ""]
OnOutput = Callable[[str, bytes], Awaitable[None]]

# The runner enforces the time limit; one that is this late is taken for dead.
_LATE_S = 5.0
# Who does not answer this is ended with all that runs in it: so a slow machine gets its time.
_RETIRE_S = 12.0
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
_COUNTED = ("created", "changed", "deleted")
_WHY = {"timeout": "it ran longer than its time limit", "cancelled": "the call was cancelled"}


class Runtime:
    """The runner of one sandbox, over one channel.

    Unless files `may_grow`, the kernel lets none become longer that a command writes to.
    """

    def __init__(self, channel: Channel, *, keep_bytes: int, may_grow: bool = True) -> None:
        self.files = Files(channel)
        self.hello: RunnerHello = channel.hello
        self.terminal = Terminal(channel, may_grow=may_grow)
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
        return self._channel.broken

    @property
    def silent(self) -> bool:
        """It is broken because the runner does not answer, which others will find, too."""
        return self._channel.silent

    async def wait_broken(self) -> None:
        """Return when no further call can succeed: it died, or the connection was closed."""
        await self._channel.wait_broken()

    async def aclose(self) -> None:
        await self._channel.aclose()

    @property
    def background(self) -> Background:
        """What commands have left running, as the runner last said; it tells every change."""
        return self._channel.background

    async def status(self, *, timeout_s: float = _LATE_S) -> RunnerStatus:
        """Who and what uses the sandbox now.

        Raises:
            SandboxGone: it does not answer within `timeout_s`.
        """
        said = (await self._channel.call("status", {}, timeout_s=timeout_s)).result
        try:
            return _status(said)
        except _MALFORMED as exc:
            raise await self._nonsense(exc) from exc

    async def retire(self, *, background_too: bool, leaving: bool = False) -> Refusal:
        """End the sandbox unless somebody else uses it; why not, or "" when it ends.

        What runs in the background keeps it, too, unless `background_too`. With `leaving` we do
        not count any more once it goes on for other servers: hang up then.

        Raises:
            SandboxGone: it does not answer.
        """
        args = {"background_too": background_too, "leaving": leaving}
        said = (await self._channel.call("retire", args, timeout_s=_RETIRE_S)).result
        refusals: tuple[Refusal, ...] = ("users", "calls", "background", "")
        if said.get("why") not in refusals:
            raise await self._nonsense(ValueError("why it does not end"))
        return cast("Refusal", said["why"])

    async def run_code(
        self,
        code: str,
        language: Language,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        """Run code in a fresh process of its language.

        Raises:
            Unsupported: the language is not installed in this sandbox.
            SandboxGone: the sandbox died under it.
        """
        args: JsonObject = {"language": language, "timeout_s": timeout_s}
        if env:
            args["env"] = dict(env)
        return await self._run(args, code.encode())

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a bash command line, or a program with its arguments without any shell.

        `on_output` gets ("stdout" | "stderr", bytes) live, with gaps when it is slow.

        Raises:
            NotFound: `cwd` cannot be used.
            SandboxGone: the sandbox died under it.
        """
        args: JsonObject = {"timeout_s": timeout_s}
        if cwd:
            args["cwd"] = cwd
        if env:
            args["env"] = dict(env)
        if isinstance(command, str):
            args["language"] = "bash"
            return await self._run(args, command.encode(), stdin, on_output)
        args["argv"] = list(command)
        return await self._run(args, None, stdin, on_output)

    async def _run(
        self,
        args: JsonObject,
        code: bytes | None,
        stdin: bytes = b"",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        args["keep_bytes"] = self._keep_bytes
        args["grow"] = self._may_grow
        args["live"] = on_output is not None
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


def _status(said: JsonObject) -> RunnerStatus:
    return RunnerStatus(
        connections=int(said["connections"]),
        calls=int(said["calls"]),
        background=background_of(said),
        idle_s=float(said["idle_s"]),
    )


def _result(reply: Reply) -> ExecResult:
    said = reply.result
    out_head, out_tail, err_head, err_tail = _cut(reply.body, said["sizes"])
    out_total, err_total = (int(total) for total in said["totals"])
    out = _text(out_head, out_tail, out_total)
    err = _text(err_head, err_tail, err_total)
    number, counts = said["signal"], said.get("counts")
    return ExecResult(
        stdout=out,
        stderr=err,
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
        changed_files=_names(said["changed"]),
        file_counts=counts and dict(zip(_COUNTED, map(int, counts), strict=True)),
    )


def _cut(body: bytes, sizes: list[int]) -> list[bytes]:
    parts, start = [], 0
    for size in sizes:
        parts.append(body[start : start + size])
        start += size
    return parts


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


def _names(value: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - as it came from the sandbox
    return None if value is None else tuple(str(name) for name in value[:20])
