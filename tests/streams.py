"""What tests ask of any stream, and of what a command prints."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from mcp_sandbox.sessions.session import Session


async def everything(stream: Any) -> bytes:
    """All that comes until the end, or until the peer breaks off."""
    data = bytearray()
    try:
        async for piece in stream:
            data += piece
    except anyio.BrokenResourceError:
        pass
    return bytes(data)


@asynccontextmanager
async def printing(session: Session, command: str | Sequence[str]) -> AsyncGenerator[None]:
    """Run a command that goes on: the block begins when it has printed; then it is cancelled."""
    printed = anyio.Event()

    async def note(_stream: str, _data: bytes) -> None:
        printed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(session.exec, command, timeout_s=60, on_output=note))
        await printed.wait()
        yield
        tasks.cancel_scope.cancel()
