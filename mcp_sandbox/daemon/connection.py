"""One client of the socket: lines of JSON to begin with, then any bytes both ways."""

import json
from collections.abc import Mapping
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteStream

# A client that takes nothing for so long is stuck for good; it must not hold up its calls.
STALLED_S = 300.0


class Connection(ByteStream):
    """A byte stream whose sending does not wait for ever."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = BufferedByteStream(stream)

    async def line(self, max_bytes: int) -> bytes:
        """The next line without its end.

        Raises:
            DelimiterNotFound: it is longer than `max_bytes`.
            IncompleteRead: the other side ended before the line did.
        """
        return await self._stream.receive_until(b"\n", max_bytes)

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Send one object as a line."""
        await self.send(json.dumps(message).encode() + b"\n")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stream.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        with anyio.move_on_after(STALLED_S):
            await self._stream.send(item)
            return
        await self.aclose()
        raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()
