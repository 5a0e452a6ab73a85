"""The calls under way on a channel, and how the runner's frames change their state."""

import signal
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from mcp_sandbox import errors
from mcp_sandbox.models import Background, BackgroundProcess, ProcessRow
from mcp_sandbox.runner.wire import protocol

JsonObject = dict[str, Any]
Sink = Callable[[str, bytes], Awaitable[None]]

_MOST_NAMED = 20
_SMALL = 4096

_FAILURES: dict[str, type[errors.SandboxError]] = {
    "invalid": errors.InvalidArgument,
    "not_found": errors.NotFound,
    "exists": errors.AlreadyExists,
    "wrong_kind": errors.WrongKind,
    "no_match": errors.NoMatch,
    "ambiguous": errors.Ambiguous,
    "permission": errors.NotPermitted,
    "too_large": errors.TooLarge,
    "no_space": errors.WorkspaceFull,
    "unsupported": errors.Unsupported,
    "busy": errors.Busy,
    "process_limit": errors.Busy,
    "cancelled": errors.Busy,
}


@dataclass(frozen=True)
class CallResult:
    """How a call ended: a small result, and what came with it."""

    result: JsonObject
    body: bytes


class PendingCall:
    """One call under way, filled by the reader."""

    def __init__(
        self, sink: Sink | None = None, *, keeps: bool = False, window: int = protocol.WINDOW
    ) -> None:
        self.sink = sink
        # Whether data is kept in `pieces`, within the credit given, or dropped.
        self.keeps = keeps or sink is not None
        self.pieces: list[tuple[str, bytes]] = []
        self._window = window
        self.ended = False
        self.reply: CallResult | None = None
        self.error: errors.SandboxError | None = None
        self.credit = window
        # Of a door, once it is open: how many doors may be open in all, and its port or 0.
        self.opened: tuple[int, int] | None = None
        self.last = ""
        self.event = anyio.Event()

    def wake(self) -> None:
        before, self.event = self.event, anyio.Event()
        before.set()

    def take(self, header: JsonObject, payload: bytes) -> None:
        """Apply a frame of the runner to this call; raise ProtocolError if it is not allowed."""
        if header["t"] == "data":
            self._collect(str(header["s"]), payload)
        elif header["t"] == "credit":
            self.credit += int(header["n"])
        elif header["t"] == "open":
            self.opened = int(header["most"]), int(header["port"])
        elif header["t"] == "done":
            if not isinstance(header["result"], dict):
                raise protocol.ProtocolError("the result is not an object")
            self.reply = CallResult(header["result"], payload)
            self.ended = True
        elif header["t"] == "fail":
            failure = _FAILURES.get(header["code"], errors.SandboxGone)
            self.error = failure(str(header["message"])[:8000])
            self.ended = True
        self.wake()

    def _collect(self, name: str, payload: bytes) -> None:
        if name not in ("body", "end", "stdout", "stderr") or not payload or self.last == "end":
            raise protocol.ProtocolError("data of an unknown stream, or none, or after its end")
        self.last = name
        if self.keeps:
            if sum(len(data) for _, data in self.pieces) > 2 * self._window:
                raise protocol.ProtocolError("more data than credit was given for")
            last, data = self.pieces[-1] if self.pieces else ("", b"")
            if last == name and len(data) + len(payload) <= _SMALL:
                # Joined, as a frame of one byte would take a hundred times its size in memory.
                self.pieces.pop()
                payload = data + payload
            self.pieces.append((name, payload))


def read_background(message: JsonObject) -> Background:
    """Return the background processes that the runner reports, bounded in number and size."""
    named = message["background"][:_MOST_NAMED]
    return Background(
        tuple(
            BackgroundProcess(int(one["pid"]), str(one["command"])[:200], str(one.get("id", "")))
            for one in named
        ),
        int(message["background_total"]),
    )


def read_process_row(message: JsonObject) -> ProcessRow:
    """Return a process as a list shows it; raise KeyError, TypeError or ValueError if malformed."""
    number = read_small_number(message["signal"])
    return ProcessRow(
        id=str(message["id"])[:40],
        command=str(message["command"])[:80],
        running=bool(message["running"]),
        seconds=float(message["seconds"]),
        exit_code=read_small_number(message["exit_code"]),
        signal=None if number is None else _signal_name(number),
        why=str(message["why"] or "")[:20],
        out_of_memory=bool(message["out_of_memory"]),
        memory_bytes=int(message.get("memory", 0)),
        of=str(message.get("of", ""))[:60],
    )


def read_small_number(value: object) -> int | None:
    """Return an exit code or signal number, or None; raise TypeError for anything else."""
    if value is None or (isinstance(value, int) and 0 <= value <= 255):
        return value
    raise TypeError("no exit code")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def split_body(body: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yield a body in parts that fit into frames."""
    if isinstance(body, bytes):
        view = memoryview(body)
        # The first piece may fill a frame: it must hold the complete code of a command.
        yield bytes(view[: protocol.WINDOW])
        for start in range(protocol.WINDOW, len(view), protocol.CHUNK):
            yield bytes(view[start : start + protocol.CHUNK])
        return
    async for piece in body:
        for start in range(0, len(piece), protocol.CHUNK):
            yield piece[start : start + protocol.CHUNK]
