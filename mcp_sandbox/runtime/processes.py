"""Typed calls about what runs in a sandbox."""

from collections.abc import AsyncIterable

from mcp_sandbox.runtime.calls import Sink
from mcp_sandbox.runtime.channel import Channel


class Processes:
    """What runs in one sandbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def dial(
        self,
        port: int,
        sent: bytes | AsyncIterable[bytes] = b"",
        sink: Sink | None = None,
        *,
        wait_s: float,
    ) -> None:
        """Connect to a port of the sandbox's loopback, until both directions have ended.

        `sink` gets ("body", bytes), and ("end", …) once. Without one, to be connected is enough.

        Raises:
            NotFound: nothing answers within `wait_s`; the message names the ports that are used.
        """
        args = {"port": port, "wait_s": wait_s, "look": sink is None}
        await self._channel.call("dial", args, body=sent, timeout_s=float("inf"), sink=sink)
