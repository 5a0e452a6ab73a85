"""Doors: ports and sockets inside a sandbox whose connections are answered by handlers here.

They use a channel of their own, which does not keep the sandbox alive; see `runner/calls/doors.py`.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
from anyio.abc import ByteStream, TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint

from mcp_sandbox.errors import SandboxError, SandboxGone
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.call import JsonObject, PendingCall
from mcp_sandbox.runtime.channel import Channel, own_tasks

logger = logging.getLogger(__name__)

PORT = 17329
Handler = Callable[[ByteStream], Awaitable[None]]

_LISTEN_S = 10.0
_POSTED = 8
# The runner accepts at most MAX_CALLS calls on one channel.
_MOST_IN_ALL = protocol.MAX_CALLS - protocol.MOST_PLACES
_WINDOW = protocol.STREAM_WINDOW
# How long a client may read nothing of the remaining data, and stay after it has read all.
_STALLED_S, _LAST_S = 60.0, 1.0
_HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


@asynccontextmanager
async def open_doors(
    open_channel: Callable[[], Awaitable[ByteStream]], token: bytes
) -> AsyncGenerator["Doors"]:
    """Open the channel for doors of a sandbox, given its `open_channel` and `token`.

    Raises:
        SandboxGone, BackendUnavailable: the sandbox does not answer.
        SandboxError: any kind: these frames are not sealed, so code inside may have forged them.
    """
    async with own_tasks() as tasks:
        channel = Channel(await open_channel(), token, "doors")
        await channel.open(tasks)
        try:
            yield Doors(channel)
        finally:
            await channel.aclose()


class Doors:
    """The ports and sockets in one sandbox on which the host listens."""

    def __init__(self, channel: Channel) -> None:
        self.wait_ended = channel.wait_broken
        self._channel = channel
        # Counts the connections of all places, and doors that wait for one.
        self._room = anyio.CapacityLimiter(_MOST_IN_ALL)

    @property
    def ended(self) -> bool:
        return self._channel.broken is not None

    @asynccontextmanager
    async def listen(
        self, handler: Handler, at: int | str = 0, *, most: int = 64, shared: bool = False
    ) -> AsyncGenerator[int | str]:
        """Listen while the block lasts; yield the port of 127.0.0.1, or the path of a unix socket.

        `at` 0 is a free port. `handler` gets each connection as a stream, at most `most` at once,
        and is cancelled with the block, or when the channel ends. Several servers may share a
        place.

        Raises:
            Busy: a program inside or another block listens there, or too many do.
            SandboxError: as `open_doors`.
        """
        listening = DoorConnection(self._channel)
        try:
            with anyio.move_on_after(_LISTEN_S) as limit:
                room, port = await listening.opened("listen", at=at, shared=shared)
            if limit.cancelled_caught:
                raise SandboxGone(f"the sandbox opened no door within {_LISTEN_S:g} s")
            self._room.total_tokens = max(1, min(room, _MOST_IN_ALL))
            async with own_tasks() as tasks:
                tasks.start_soon(self._serve_all, handler, port or at, most)
                yield port or at
        finally:
            await listening.hang_up()

    async def _serve_all(self, handler: Handler, at: int | str, most: int) -> None:
        """Keep some doors waiting, and give each that a client has reached to the handler."""
        places = anyio.Semaphore(most)

        async def serve(tasks: TaskGroup) -> None:
            try:
                async with places, self._room, DoorConnection(self._channel) as door:
                    await door.opened("door", at=at)
                    tasks.start_soon(serve, tasks)
                    await handler(door)
            except* (*_HUNG_UP, SandboxError):
                pass
            except* Exception:
                logger.exception("the handler of a connection out of a sandbox failed")

        async with anyio.create_task_group() as tasks:
            for _ in range(_POSTED):
                tasks.start_soon(serve, tasks)
            await self.wait_ended()
            tasks.cancel_scope.cancel()


class DoorChannel:
    """The channel for doors of one sandbox: opened for the first door, open until closed."""

    def __init__(
        self, open_channel: Callable[[], Awaitable[ByteStream]], token: bytes, tasks: TaskGroup
    ) -> None:
        self._opening, self._tasks = partial(open_doors, open_channel, token), tasks
        self._lock = anyio.Lock()
        self._doors: Doors | None = None
        self._scope = anyio.CancelScope()

    def close(self) -> None:
        """End the channel, and with it all handlers."""
        self._scope.cancel()

    async def open_channel(self) -> Doors:
        """Return the doors; open the channel if needed. Raises SandboxGone if none answers."""
        async with self._lock:
            if self._doors is None or self._doors.ended:
                self._doors = await self._tasks.start(self._open)
            return self._doors

    async def _open(self, *, task_status: TaskStatus[Doors]) -> None:
        doors: Doors | None = None
        with anyio.CancelScope() as self._scope:
            async with self._opening() as doors:
                task_status.started(doors)
                await doors.wait_ended()
        if doors is None:
            raise SandboxGone("the sandbox was ended before a door could be opened")


class DoorConnection(ByteStream):
    """A connection from inside, or the call that listens for them, before it is opened."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._call = PendingCall(keeps=True, window=_WINDOW)
        self._number = channel.number(self._call)
        self._received = 0  # Bytes received for which no new credit was given yet.

    async def opened(self, op: str, **args: object) -> tuple[int, int]:
        """Make the call; when it is open, return how many doors may be open, and the port."""
        await self._channel.send({"t": "call", "id": self._number, "op": op, "args": args})
        while self._call.opened is None:
            if self._call.error:
                raise self._call.error
            await self._call.event.wait()
        return self._call.opened

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
        """Close the connection after the client has read everything, or could close it first.

        To close it while the client still sends would make its kernel drop the answer.
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
            await self.hang_up()

    async def hang_up(self) -> None:
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
