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
from mcp_sandbox.runtime.calls import Call, JsonObject
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
        SandboxGone, BackendUnavailable: the sandbox does not answer.
        SandboxError: of any kind, if code inside has got between, as these frames are not sealed.
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
    """Return how many doors the place may have."""
    with anyio.move_on_after(_LISTEN_S):
        return min(await Door(channel).opened("listen", at), protocol.MOST_DOORS)
    raise SandboxGone(f"the sandbox opened no door within {_LISTEN_S:g} s")


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
    """A connection from inside, or the call that listens for them, before it is opened."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._call = Call(keeps=True, window=_WINDOW)
        self._number = channel.number(self._call)
        self._received = 0  # So much was not given credit for.

    async def opened(self, op: str, at: int | str) -> int:
        """Make the call; returns when it is open, and for how many doors."""
        await self._send({"t": "call", "op": op, "args": {"at": at}})
        while self._call.opened is None and not self._call.error:
            await self._call.event.wait()
        if self._call.error:
            raise self._call.error
        return self._call.opened or 0

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await checkpoint()
        call = self._call
        while not (call.pieces or call.ended):
            await call.event.wait()
        if not call.pieces:
            raise anyio.BrokenResourceError
        name, piece = call.pieces[0]
        if name == "end":
            raise anyio.EndOfStream
        data, rest = piece[:max_bytes], piece[max_bytes:]
        call.pieces[:1] = [(name, rest)] if rest else []
        self._received += len(data)
        if self._received >= _WINDOW // 4 and not call.ended:
            size, self._received = self._received, 0
            await self._send({"t": "credit", "n": size})
        return data

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            while self._call.credit <= 0 and not self._call.ended:
                await self._call.event.wait()
            piece = rest[: min(self._call.credit, protocol.CHUNK)]
            self._call.credit -= len(piece)
            await self._send({"t": "data", "more": True}, piece)
            rest = rest[len(piece) :]

    async def send_eof(self) -> None:
        await self._send({"t": "data", "more": False})

    async def aclose(self) -> None:
        """Hang up when the client has all that was sent, and had a moment to do so first.

        While it still sends, its kernel would drop the answer.
        """
        try:
            await self.send_eof()
            while self._call.credit < _WINDOW and not self._call.ended:
                with anyio.fail_after(_STALLED_S):
                    await self._call.event.wait()
            with anyio.move_on_after(_LAST_S):
                async for _ in self:
                    pass
        except (*_HUNG_UP, TimeoutError):
            pass
        finally:
            with suppress(*_HUNG_UP):
                await self._send({"t": "cancel"})
            self._call.ended = True
            self._channel.forget(self._number)
            self._call.wake()

    async def _send(self, header: JsonObject, payload: bytes | memoryview = b"") -> None:
        if self._call.ended:
            raise anyio.BrokenResourceError
        try:
            await self._channel.send({**header, "id": self._number}, payload)
        except SandboxGone as exc:
            raise anyio.BrokenResourceError from exc
