"""What tests ask of any stream."""

from typing import Any

import anyio


async def everything(stream: Any) -> bytes:
    """All that comes until the end, or until the peer breaks off."""
    data = bytearray()
    try:
        async for piece in stream:
            data += piece
    except anyio.BrokenResourceError:
        pass
    return bytes(data)
