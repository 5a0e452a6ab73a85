"""This process's stdin and stdout as byte streams that nothing else can touch."""

import fcntl
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream

# A pipe or socket that is ready for writing takes this much without blocking.
_ATOMIC_BYTES = 4096


@contextmanager
def claimed_stdio() -> Generator[tuple["DescriptorReader", "DescriptorWriter"]]:
    """Take stdin and stdout away from everybody else until the block is left."""
    reading = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    writing = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield DescriptorReader(reading), DescriptorWriter(writing)
    finally:
        # What others printed meanwhile goes to stderr, not to the client.
        sys.stdout.flush()
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        for descriptor in (reading, writing, nothing):
            os.close(descriptor)


class DescriptorReader(ByteReceiveStream):
    """Reads a file descriptor without a thread, so that waiting for it can be cancelled."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            await _ready(anyio.wait_readable, self._descriptor)
            try:
                data = os.read(self._descriptor, max_bytes)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            if not data:
                raise anyio.EndOfStream
            return data

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


class DescriptorWriter(ByteSendStream):
    """Writes a file descriptor without blocking the event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            await _ready(anyio.wait_writable, self._descriptor)
            try:
                rest = rest[os.write(self._descriptor, rest[:_ATOMIC_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise anyio.BrokenResourceError from exc

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


async def _ready(wait: Callable[[int], Awaitable[None]], descriptor: int) -> None:
    try:
        await wait(descriptor)
    except PermissionError:
        # Files and /dev/null cannot be waited for: they are always ready.
        await anyio.lowlevel.checkpoint()
