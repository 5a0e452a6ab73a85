"""Typed calls to the runner about processes by their ids, and the results of commands."""

import signal
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO

from anyio import CancelScope

from mcp_sandbox.errors import InvalidArgument, SandboxGone
from mcp_sandbox.models import Background, ExecResult, FileContent, ProcessRow
from mcp_sandbox.runtime.call import CallResult, JsonObject, Sink, read_background, read_process_row
from mcp_sandbox.runtime.channel import Channel

_SIGNALS = {name: n for n in signal.Signals for name in (n.name[3:], str(n.value))}
# A sandbox that takes longer to answer is ended, so this allows for a slow machine.
LATE_S = 12.0
_COUNTED = ("created", "changed", "deleted")
_WHY = {
    "timeout": "it ran longer than its time limit",
    "cancelled": "the call was cancelled",
    "memory": "it held more memory than its memory_mb",
}
_MOST_ROWS = 1000
_MOST_FIGURES = 100
_OF_SHELL = {
    "new": "this shell is new; the next call with its name continues where this one ended",
    "broken": "the saved state of this shell was damaged: the shell has started again",
    "moved": "the directory this shell was in is gone: this command began in /workspace",
    "kept": "the shell remembers nothing of this command and is as before it: bash was killed, "
    "replaced by exec, or left by exit under its own EXIT trap, or more than 4 MiB were to be kept",
}


class RuntimeProcesses:
    """The processes of one sandbox, over one channel.

    Any call may raise SandboxGone, and NotFound for an unknown id; the message lists the known
    ones.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def list(self) -> Sequence[ProcessRow]:
        """Return running and recently ended processes, the newest last."""
        reply = await self._channel.call("processes", {}, timeout_s=LATE_S)
        async with checked_answers(self._channel):
            return [read_process_row(row) for row in reply.result["processes"][:_MOST_ROWS]]

    async def wait(
        self,
        process: str,
        *,
        until: str | None = None,
        whole: bool = False,
        typed: tuple[str, str | None] | None = None,
        on_output: Sink | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Wait until it ends, `until` is in its new output, or `leave` is cancelled.

        The result has the output since the last result, or with `whole` all that is kept.
        """
        args = {"process": process, "until": until, "whole": whole, "live": bool(on_output)}
        args |= {"text": typed[0], "key": typed[1]} if typed else {}
        return await self._look("type" if typed else "wait", args, on_output, leave)

    async def stop(self, process: str, how: str = "TERM", *, grace_s: float = 5.0) -> ExecResult:
        """Send a signal to its process group; after `grace_s` seconds kill its process tree."""
        if not (number := _SIGNALS.get(how.upper().removeprefix("SIG"))):
            raise InvalidArgument(
                f"there is no signal {how[:20]!r}: give one of {', '.join(_SIGNALS)}"
            )
        args = {"process": process, "signal": number.value, "grace_s": grace_s}
        return await self._look("stop", args)

    async def dial(
        self,
        port: int,
        sent: bytes | AsyncIterable[bytes] = b"",
        sink: Sink | None = None,
        *,
        wait_s: float,
    ) -> None:
        """Connect to a port on the sandbox's loopback; return once both directions have ended.

        `sink` gets ("body", bytes), and ("end", …) once; if None, only try to connect.

        Raises NotFound: no program accepts within `wait_s`; the message names the ports in use.
        """
        args = {"port": port, "wait_s": wait_s, "look": sink is None}
        await self._channel.call("dial", args, body=sent, timeout_s=float("inf"), sink=sink)

    async def _look(
        self,
        op: str,
        args: JsonObject,
        on_output: Sink | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        reply = await self._channel.call(
            op, args, timeout_s=float("inf"), sink=on_output, leave=leave
        )
        async with checked_answers(self._channel):
            result = read_exec_result(reply)
        if not result.running:
            self._channel.ended.pop(str(args["process"]), None)
        return result

    def untold(self) -> Sequence[ProcessRow]:
        """Return ended processes that no user or agent has been told of, as the runner reports."""
        return [*self._channel.ended.values()]

    async def tell(self, rows: Sequence[ProcessRow]) -> None:
        """Tell the runner that these ends were reported, so that no other server does it again."""
        for row in rows:
            self._channel.ended.pop(row.id, None)
        await self._channel.call("told", {"processes": [row.id for row in rows]}, timeout_s=LATE_S)


@asynccontextmanager
async def checked_answers(channel: Channel) -> AsyncGenerator[None]:
    """Read a result in the block; if it is malformed, close the channel and raise SandboxGone."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        await channel.aclose()
        raise SandboxGone(f"the sandbox sent a malformed result: {exc}") from exc


def read_exec_result(reply: CallResult) -> ExecResult:
    """Return how a command ended, or its state while it runs."""
    result, body = reply.result, BytesIO(reply.body)
    out_head, out_tail, err_head, err_tail = (body.read(int(size)) for size in result["sizes"])
    out_from, err_from = (int(start) for start in result["starts"])
    out_total, err_total = (int(total) for total in result["totals"])
    out_total, err_total = out_total - out_from, err_total - err_from
    counts, changed, row = result.get("counts"), result["changed"], read_process_row(result)
    names, new = tuple(str(name) for name in (changed or ())[:20]), result.get("created")
    made = None if new is None else tuple(each for at, each in enumerate(names) if at in new)
    return ExecResult(
        stdout=_text(out_head, out_tail, out_total),
        stderr=_text(err_head, err_tail, err_total),
        exit_code=row.exit_code,
        signal=row.signal,
        duration_ms=int(result["duration_ms"]),
        timed_out=row.why == "timeout",
        out_of_memory=row.out_of_memory,
        killed_because=_WHY.get(row.why),
        truncated=len(reply.body) < out_total + err_total,
        stdout_bytes=out_total,
        stderr_bytes=err_total,
        output_file=None if result["output_file"] is None else str(result["output_file"]),
        changed_files=None if changed is None else names,
        created_files=made,
        file_counts=counts and dict(zip(_COUNTED, map(int, counts), strict=True)),
        made_room=read_background(result["made_room"]) if "made_room" in result else Background(),
        figures=tuple(
            # Only paths: the files are read later.
            FileContent(str(path)[:4096], "binary", "", 0, b"")
            for path in result["figures"][:_MOST_FIGURES]
        ),
        notebook=str(result["notebook"]),
        process=None if result["process"] is None else row.id,
        running=row.running,
        stopped=row.why == "stopped",
        until_met=bool(result["until_met"]),
        left_s=None if result["left_s"] is None else max(0, min(int(result["left_s"]), 100_000)),
        stdout_from=out_from,
        stderr_from=err_from,
        of=row.of,
        shell=() if row.running else tuple(_OF_SHELL[word] for word in result["shell"][:4]),
    )


def _text(head: bytes, tail: bytes, total: int) -> str:
    """Return the complete output, or both ends and a line that says how much is left out."""
    missing = total - len(head) - len(tail)
    if missing <= 0:
        return (head + tail).decode("utf-8", "replace")
    start, end = head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
    return f"{start}\n[... {missing:,} bytes left out ...]\n{end}"
