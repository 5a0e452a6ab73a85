"""Doors: connections that programs inside make to a place there, each answered by a handler here.

They come over a channel of their own, which is no use of the sandbox; see `runner/doors.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from mcp_sandbox.errors import SandboxError, SandboxGone
from mcp_sandbox.runner import protocol
from mcp_sandbox.runtime.calls import JsonObject, failure_of
from mcp_sandbox.runtime.channel import Channel

PORT = 17329
Handler = Callable[[ByteStream], Awaitable[None]]

_LISTEN_S = 10.0
_POSTED = 8
_WINDOW = protocol.STREAM_WINDOW
# How long a client may take nothing of what is left for it, and stay when it has all.
_STALLED_S, _LAST_S = 60.0, 1.0
_HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


@asynccontextmanager
async def doors(
    open_channel: Callable[[], Awaitable[ByteStream]],
    token: bytes,
    handler: Handler,
    *,
    at: int | str = PORT,
) -> AsyncGenerator[Callable[[], Awaitable[object]]]:
    """Listen inside, on a port of 127.0.0.1 or the path of a unix socket, while the block lasts.

    `open_channel` and `token` are those of the sandbox. `handler` gets every connection as a stream
    and is cancelled with the block, or when the channel ends. What is yielded waits for that end.

    Raises:
        Busy: a program inside listens there already.
        SandboxGone: the sandbox does not answer.
    """
    try:
        async with anyio.create_task_group() as tasks:
            channel = Channel(await open_channel(), token, "doors")
            await channel.open(tasks)
            try:
                most = await _listen(channel, at)
                tasks.start_soon(_serve_all, channel, handler, at, most)
                yield channel.wait_broken
            finally:
                await channel.aclose()
    except BaseExceptionGroup as group:
        # Of the block, or of its beginning: the tasks raise nothing.
        raise group.exceptions[0] from None


async def _listen(channel: Channel, at: int | str) -> int:
    """Open the place; returns how many doors it may have."""
    try:
        with anyio.fail_after(_LISTEN_S):
            return min(await Door(channel).opened("listen", at), protocol.MOST_DOORS)
    except TimeoutError as exc:
        raise SandboxGone(f"the sandbox opened no door within {_LISTEN_S:g} s") from exc


async def _serve_all(channel: Channel, handler: Handler, at: int | str, most: int) -> None:
    """Keep some doors posted, and hand each at which there is a client to the handler."""
    places = anyio.Semaphore(max(1, most))

    async def serve(tasks: TaskGroup) -> None:
        with suppress(*_HUNG_UP, SandboxError):
            async with places, Door(channel) as door:
                await door.opened("door", at)
                tasks.start_soon(serve, tasks)
                await handler(door)

    async with anyio.create_task_group() as tasks:
        for _ in range(_POSTED):
            tasks.start_soon(serve, tasks)
        await channel.wait_broken()
        tasks.cancel_scope.cancel()


class Door(ByteStream):
    """A connection from inside as a stream, for one reader and one writer at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = channel.number(self)
        self._most: int | None = None
        # What came and was not received yet, and what was received and not given credit for.
        self._waiting, self._received = bytearray(), 0
        self._credit = _WINDOW
        self._no_more_comes = self._over = self._closed = False
        self._error: SandboxError | None = None
        self._event = anyio.Event()

    async def opened(self, op: str, at: int | str) -> int:
        """Make the call; returns when it is open, for as many doors as that says."""
        await self._send({"t": "call", "op": op, "args": {"at": at}})
        while self._most is None and not self._over:
            await self._event.wait()
        if self._error:
            raise self._error
        return self._most or 0

    def take(self, header: JsonObject, payload: bytes) -> None:
        """What a frame of the runner says of it; ProtocolError if it may not."""
        if header["t"] == "data":
            self._waiting += payload if header["s"] == "body" else b""
            self._no_more_comes = header["s"] == "end"
            if len(self._waiting) > 2 * _WINDOW:
                raise protocol.ProtocolError("more data than credit was given for")
        elif header["t"] == "credit":
            self._credit += int(header["n"])
        elif header["t"] == "open":
            self._most = int(header["most"])
        elif header["t"] == "fail":
            self._error, self._over = failure_of(header), True
        elif header["t"] == "done":
            self._over = True
        self._wake()

    def lose(self, error: SandboxError) -> None:
        """The channel has ended."""
        self._error, self._over = error, True
        self._wake()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await checkpoint()
        while not (self._waiting or self._no_more_comes or self._over or self._closed):
            await self._event.wait()
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._waiting:
            raise anyio.EndOfStream if self._no_more_comes else anyio.BrokenResourceError
        data = bytes(memoryview(self._waiting)[:max_bytes])
        del self._waiting[:max_bytes]
        self._received += len(data)
        if self._received >= _WINDOW // 4 and not self._no_more_comes:
            size, self._received = self._received, 0
            await self._send({"t": "credit", "n": size})
        return data

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            while self._credit <= 0 and not (self._over or self._closed):
                await self._event.wait()
            piece = rest[: min(self._credit, protocol.CHUNK)]
            self._credit -= len(piece)
            await self._send({"t": "data", "more": True}, piece)
            rest = rest[len(piece) :]

    async def send_eof(self) -> None:
        await self._send({"t": "data", "more": False})

    async def aclose(self) -> None:
        """Hang up when the client has what was sent, and a moment to take its leave.

        To hang up while it sends would have its kernel drop the answer.
        """
        try:
            await self.send_eof()
            while self._credit < _WINDOW and not self._over:
                with anyio.fail_after(_STALLED_S):
                    await self._event.wait()
            with anyio.move_on_after(_LAST_S):
                async for _ in self:
                    pass
        except (*_HUNG_UP, TimeoutError):
            pass
        finally:
            await self._drop()

    async def _drop(self) -> None:
        with suppress(*_HUNG_UP):
            await self._send({"t": "cancel"})
        self._closed = True
        self._channel.forget(self._number)
        self._wake()

    async def _send(self, header: JsonObject, payload: bytes | memoryview = b"") -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._over:
            raise anyio.BrokenResourceError
        try:
            await self._channel.send({**header, "id": self._number}, payload)
        except SandboxGone as exc:
            raise anyio.BrokenResourceError from exc

    def _wake(self) -> None:
        before, self._event = self._event, anyio.Event()
        before.set()
