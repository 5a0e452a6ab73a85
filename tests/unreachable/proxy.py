"""A proxy before what makes sandboxes: it refuses, answers 503, hangs, and lets through again."""

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import ByteStream, TaskGroup

from mcp_sandbox.backends.local_socket import SocketStream

FAULTS = ("refuses", "answers 503", "hangs")
_ENDS = (
    *(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError),
    anyio.DelimiterNotFound,
)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b'Content-Length: 32\r\nConnection: close\r\n\r\n{"code":503,"message":"planted"}'
)


class Proxy:
    """Listens at a port of its own, or at `path`, and connects by `reach`."""

    def __init__(self, reach: Callable[[], Awaitable[ByteStream]], path: Path | None) -> None:
        self._reach, self._path = reach, path
        self._fault: str | None = None
        self._flows = anyio.Event()
        self._flows.set()
        self._open: set[anyio.CancelScope] = set()
        self._listening = anyio.CancelScope()
        self.port = 0
        self._tasks: TaskGroup

    async def set(self, fault: str | None) -> None:
        """Behave so from now on; what was held back by a proxy that hung goes on."""
        before, self._fault = self._fault, fault
        if fault == "hangs":
            self._flows = anyio.Event()
            return
        self._flows.set()
        if fault:
            for each in list(self._open):
                each.cancel()
        if fault == "refuses":
            self._listening.cancel()
            if self._path:
                self._path.unlink()
        elif before == "refuses":
            await self._tasks.start(self._listen)

    async def _listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._listening, self._bound() as listener:
            task_status.started()
            while True:
                await anyio.wait_readable(listener)
                with suppress(BlockingIOError):
                    came, _ = listener.accept()
                    came.setblocking(False)
                    if not self._path:
                        # Else an answer waits for what the client acknowledges late.
                        came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._tasks.start_soon(self._serve, SocketStream(came))

    def _bound(self) -> socket.socket:
        kind = socket.AF_UNIX if self._path else socket.AF_INET
        place = str(self._path) if self._path else ("127.0.0.1", self.port)
        listener = socket.create_server(place, family=kind, backlog=128)
        listener.setblocking(False)
        self.port = 0 if self._path else listener.getsockname()[1]
        return listener

    async def _serve(self, client: ByteStream) -> None:
        with anyio.CancelScope() as scope, suppress(*_ENDS):
            self._open.add(scope)
            try:
                async with client:
                    await self._flows.wait()
                    if self._fault == "answers 503":
                        await client.receive()
                        await client.send(_BUSY)
                        return
                    async with await self._reach() as server:
                        await self._join(client, server)
            except* _ENDS:
                pass
            finally:
                self._open.discard(scope)

    async def _join(self, client: ByteStream, server: ByteStream) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._copy, client, server)
            await self._copy(server, client)
            tasks.cancel_scope.cancel()

    async def _copy(self, source: ByteStream, target: ByteStream) -> None:
        with suppress(*_ENDS):
            async for data in source:
                await self._flows.wait()
                await target.send(data)
            await self._flows.wait()
            await target.send_eof()


@asynccontextmanager
async def proxied(
    reach: Callable[[], Awaitable[ByteStream]], path: Path | None = None
) -> AsyncGenerator[Proxy]:
    """Run one until the block ends."""
    proxy = Proxy(reach, path)
    async with anyio.create_task_group() as proxy._tasks:
        await proxy._tasks.start(proxy._listen)
        yield proxy
        proxy._flows.set()
        proxy._tasks.cancel_scope.cancel()
