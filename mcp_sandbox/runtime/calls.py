"""The calls under way on a channel, and what the frames of a runner make of them."""

import signal
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from mcp_sandbox import errors
from mcp_sandbox.models import Background, BackgroundProcess, ProcessRow
from mcp_sandbox.runner import protocol

JsonObject = dict[str, Any]
Sink = Callable[[str, bytes], Awaitable[None]]

_MOST_NAMED = 20

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
class Reply:
    """How a call ended: a small result, and what came with it."""

    result: JsonObject
    body: bytes


class Taker(Protocol):
    """What the reader of a channel gives the frames of one call."""

    def take(self, header: JsonObject, payload: bytes) -> None: ...
    def lose(self, error: errors.SandboxError) -> None: ...


class Call:
    """One call under way, filled by the reader."""

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self.pieces: list[tuple[str, bytes]] = []
        self.ended = False
        self.reply: Reply | None = None
        self.error: errors.SandboxError | None = None
        self.credit = protocol.WINDOW
        self.last = ""
        self.event = anyio.Event()

    def wake(self) -> None:
        """Let everybody who waits for a change look again."""
        before, self.event = self.event, anyio.Event()
        before.set()

    def take(self, header: JsonObject, payload: bytes) -> None:
        """What a frame of the runner says of this call; ProtocolError if it may not."""
        if header["t"] == "data":
            self._collect(str(header["s"]), payload)
        elif header["t"] == "credit":
            self.credit += int(header["n"])
        elif header["t"] == "done":
            if not isinstance(header["result"], dict):
                raise protocol.ProtocolError("the result is not an object")
            self.reply = Reply(header["result"], payload)
            self.ended = True
        elif header["t"] == "fail":
            self.lose(failure_of(header))
        self.wake()

    def lose(self, error: errors.SandboxError) -> None:
        """It has ended so."""
        self.error = error
        self.ended = True
        self.wake()

    def _collect(self, name: str, payload: bytes) -> None:
        if name not in ("body", "end", "stdout", "stderr") or not payload or self.last == "end":
            raise protocol.ProtocolError("data of an unknown stream, or none, or after its end")
        self.last = name
        if self.sink:
            # The credit given bounds what may wait here.
            if sum(len(data) for _, data in self.pieces) > 2 * protocol.WINDOW:
                raise protocol.ProtocolError("more data than credit was given for")
            self.pieces.append((name, payload))


def failure_of(header: JsonObject) -> errors.SandboxError:
    """Why a call has failed, as the runner says."""
    failure = _FAILURES.get(header["code"], errors.SandboxGone)
    return failure(str(header["message"])[:8000])


def background_of(said: JsonObject) -> Background:
    """What the runner says of processes in the background, bounded."""
    named = said["background"][:_MOST_NAMED]
    return Background(
        tuple(
            BackgroundProcess(int(one["pid"]), str(one["command"])[:200], str(one.get("id", "")))
            for one in named
        ),
        int(said["background_total"]),
    )


def row_of(said: Mapping[str, object]) -> ProcessRow:
    """A process as a list shows it; TypeError and its like if that is no such thing."""
    number = small(said["signal"])
    return ProcessRow(
        id=str(said["id"])[:40],
        command=str(said["command"])[:80],
        running=bool(said["running"]),
        seconds=float(str(said["seconds"])),
        exit_code=small(said["exit_code"]),
        signal=None if number is None else _signal_name(number),
        why=str(said["why"] or "")[:20],
        out_of_memory=bool(said["out_of_memory"]),
        memory_bytes=int(str(said.get("memory", 0))),
        of=str(said.get("of", ""))[:60],
    )


def small(value: object) -> int | None:
    """An exit code or signal, or None."""
    if value is None or (isinstance(value, int) and 0 <= value <= 255):
        return value
    raise TypeError("no exit code")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def pieces(body: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """A body in parts that fit in frames."""
    if isinstance(body, bytes):
        view = memoryview(body)
        # The first piece may be as long as a frame: the code of a command must be whole in it.
        yield bytes(view[: protocol.WINDOW])
        for start in range(protocol.WINDOW, len(view), protocol.CHUNK):
            yield bytes(view[start : start + protocol.CHUNK])
        return
    async for piece in body:
        for start in range(0, len(piece), protocol.CHUNK):
            yield piece[start : start + protocol.CHUNK]
