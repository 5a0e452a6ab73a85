"""Live output and signs of life as MCP progress, for clients that asked for it."""

import codecs
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.identity import Request
from mcp_sandbox.server.text import clip, printed

OnOutput = Callable[[str, bytes], Awaitable[None]]

INTERVAL_S = 0.2
"""At most five messages a second."""
SILENCE_S = 10.0
"""Clients give up on a call they hear nothing of, so a silent one says that it is alive."""
_MAX_KEPT = 2_000


@asynccontextmanager
async def live_progress(request: Request) -> AsyncGenerator[OnOutput | None]:
    """Report what is fed to the yielded function while the body runs; None if nobody listens."""
    meta = request.request_context.meta
    if not meta or meta.get("progress_token") is None:
        yield None
        return
    progress = _Progress(request)
    with sole_error():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(progress.report)
            yield progress.take
            tasks.cancel_scope.cancel()


class _Progress:
    """The last output of a call, and the loop that sends it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._started = time.monotonic()
        self._recent = ""
        self._arrived = anyio.Event()
        self._decoders = {
            stream: codecs.getincrementaldecoder("utf-8")("replace")
            for stream in ("stdout", "stderr")
        }

    async def take(self, stream: str, data: bytes) -> None:
        # Only the end of a chunk can become the last lines.
        text = self._decoders[stream].decode(data[-4 * _MAX_KEPT :])
        self._recent = (self._recent + text)[-_MAX_KEPT:]
        self._arrived.set()

    async def report(self) -> None:
        while True:
            with anyio.move_on_after(SILENCE_S):
                await self._arrived.wait()
            elapsed_s = time.monotonic() - self._started
            message = self._message() if self._arrived.is_set() else None
            self._arrived = anyio.Event()
            await self._request.report_progress(
                elapsed_s, message=message or f"running for {elapsed_s:.0f} s"
            )
            await anyio.sleep(INTERVAL_S)

    def _message(self) -> str:
        lines = [line for line in printed(self._recent).splitlines() if line.strip()]
        return clip("\n".join(lines[-3:]), 500)
