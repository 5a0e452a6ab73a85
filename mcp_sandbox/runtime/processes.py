"""Typed calls about what runs in a sandbox."""

from collections.abc import AsyncIterable, Awaitable, Callable

from mcp_sandbox.runtime.channel import Channel


async def _nowhere(_data: bytes) -> None:
    return


class Processes:
    """What runs in one sandbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def dial(
        self,
        port: int,
        sent: AsyncIterable[bytes] | None = None,
        take: Callable[[bytes], Awaitable[None]] = _nowhere,
        *,
        wait_s: float,
    ) -> None:
        """Connect to a port of the sandbox's loopback, until both directions have ended.

        `take` gets what comes back, at its end b"". Without `sent` it ends when it is connected.

        Raises:
            NotFound: nothing answers within `wait_s`; the message names the ports that are used.
        """
        args = {"port": port, "wait_s": wait_s, "look": sent is None}
        await self._channel.call(
            "dial",
            args,
            body=sent or b"",
            timeout_s=float("inf"),
            sink=lambda stream, data: take(data if stream == "body" else b""),
        )
