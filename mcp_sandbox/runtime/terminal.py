"""A person's shell in one sandbox: frames in, what the terminal shows out, until it ends."""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping

from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import TerminalEnd
from mcp_sandbox.runtime.channel import Channel, JsonObject

Show = Callable[[bytes], Awaitable[None]]


class Terminal:
    """Shells in a sandbox, over one channel. Unless they `may_grow`, no file becomes longer."""

    def __init__(self, channel: Channel, *, may_grow: bool) -> None:
        self._channel = channel
        self._may_grow = may_grow

    async def run(
        self, frames: AsyncIterable[bytes], show: Show, *, args: Mapping[str, object]
    ) -> TerminalEnd:
        """Let somebody use a shell; it ends at the latest with `frames` (runner/frames.py).

        `args`: its `env`, whether it has a `tty`, and the `command` to run instead.

        Raises:
            Unsupported: the sandbox has no shell.
            SandboxGone: it died under it.
        """

        async def take(_name: str, data: bytes) -> None:
            await show(data)

        told: JsonObject = {**args, "grow": self._may_grow}
        reply = await self._channel.call(
            "terminal", told, body=frames, timeout_s=float("inf"), sink=take
        )
        try:
            return TerminalEnd(
                exit_code=_number(reply.result["exit_code"]), signal=_number(reply.result["signal"])
            )
        except (KeyError, TypeError) as exc:
            await self._channel.aclose()
            raise SandboxGone(f"the sandbox sent a result that makes no sense: {exc}") from exc


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and 0 <= value <= 255):
        return value
    raise TypeError("no exit code")
