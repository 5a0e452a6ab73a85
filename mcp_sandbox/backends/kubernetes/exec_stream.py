"""Byte streams to the runner over the WebSocket of an exec.

The first byte of a message tells its channel: 0 input, 1 output, 2 errors, 3 how it ended.
"""

import anyio
from anyio.abc import ByteStream, TaskGroup, TaskStatus

from mcp_sandbox.backends.kubernetes.client import WEBSOCKET_ENDS, ApiServer, Refused, WebSocket
from mcp_sandbox.errors import SandboxGone, Unreachable

# A pod, and one of its containers.
Place = tuple[str, str]
_INPUT, _OUTPUT, _ERRORS, _STATUS = b"\x00", 1, 2, 3
_CONNECTED = b"connected\n"
_PIECE = 32 * 1024
_MOST_COMPLAINT = 4096
_CLOSE_S = 2.0
MISSED = "the runner in the sandbox is not reached, the next call tries again"
CUT = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError)


class ExecFailed(Unreachable):
    """No relay could be started, or it was cut off before it had reached its runner."""


class NotListening(SandboxGone):
    """The relay did not reach its runner: it said so."""


class ExecStream(ByteStream):
    """Standard input and output of a program in a pod, as one stream."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._output = bytearray()
        self.complaint = bytearray()
        self.ended = False
        self.closed = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._output:
            await self._next_message()
        taken = bytes(self._output[:max_bytes])
        del self._output[:max_bytes]
        return taken

    async def send(self, item: bytes) -> None:
        if self.closed.is_set():
            raise anyio.ClosedResourceError
        try:
            for start in range(0, len(item), _PIECE):
                await self._websocket.send_bytes(_INPUT + item[start : start + _PIECE])
        except WEBSOCKET_ENDS as exc:
            raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        # Version 4 has no half-close: to close the whole stream is the nearest to it.
        await self.aclose()

    async def aclose(self) -> None:
        self.closed.set()
        await anyio.lowlevel.checkpoint()

    async def wait_connected(self) -> None:
        """Wait until the relay says so; raises anyio.EndOfStream if it ended first."""
        while _CONNECTED not in self.complaint:
            await self._next_message()

    async def connect(self, given: bytes, within_s: float) -> None:
        """Have the relay read `given` and reach its runner. Raises ExecFailed, NotListening."""
        try:
            with anyio.fail_after(within_s):
                await self.send(given)
                await self.wait_connected()
        except BaseException as exc:
            self.closed.set()
            if not isinstance(exc, CUT):
                raise
            said = self.complaint.decode(errors="replace").strip()
            # Else the node did not let it run.
            kind = NotListening if self.ended and said.startswith("relay:") else ExecFailed
            raise kind(f"{MISSED} ({said or exc})") from exc

    async def _next_message(self) -> None:
        if self.closed.is_set():
            raise anyio.ClosedResourceError
        if self.ended:
            raise anyio.EndOfStream
        try:
            message = await self._websocket.receive_bytes()
        except (*WEBSOCKET_ENDS, anyio.ClosedResourceError, anyio.BrokenResourceError) as exc:
            raise anyio.EndOfStream from exc
        kind, data = message[0], message[1:]
        if kind == _OUTPUT:
            self._output += data
        elif kind == _ERRORS:
            self.complaint += data[: _MOST_COMPLAINT - len(self.complaint)]
        elif kind == _STATUS:
            self.ended = True


async def open_exec(
    api: ApiServer, tasks: TaskGroup, at: Place, command: list[str], within_s: float
) -> ExecStream:
    """Start a relay in a pod, which is still to connect; it is closed when `tasks` end.

    Raises ExecFailed.
    """
    try:
        with anyio.fail_after(within_s):
            stream: ExecStream = await tasks.start(_keep_open, api, at, command)
            return stream
    except (Refused, TimeoutError, *WEBSOCKET_ENDS) as exc:
        raise ExecFailed(f"{MISSED} ({exc})") from exc


async def _keep_open(
    api: ApiServer, at: Place, command: list[str], *, task_status: TaskStatus[ExecStream]
) -> None:
    """Keep the WebSocket in one task, where it must be left as it was entered."""
    started = False
    try:
        async with api.exec(*at, command) as websocket:
            stream = ExecStream(websocket)
            task_status.started(stream)
            started = True
            await stream.closed.wait()
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await websocket.close()
    except WEBSOCKET_ENDS:
        if not started:
            raise
        # Who reads or writes has been told.
