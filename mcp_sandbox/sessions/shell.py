"""A person's shell in a chat's computer."""

from collections.abc import AsyncIterable, Mapping

from mcp_sandbox.models import TerminalEnd
from mcp_sandbox.runtime.terminal import Show
from mcp_sandbox.sessions.hold import Hold


class Shell:
    """Shells in the sandbox of one chat, beside what its agent does there."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    async def run(
        self, frames: AsyncIterable[bytes], show: Show, *, args: Mapping[str, object]
    ) -> TerminalEnd:
        """Let a person use a shell; what it leaves running ends with it. See runtime/terminal.

        In a full workspace it can look and delete, but not write.

        Raises:
            SandboxError: as a call of the session.
        """
        full = await self._hold.meter.problem()
        async with self._hold.call(endless=True) as held:
            runtime = held.runtime.bounded(may_grow=full is None)
            try:
                with held.guard.call(may_end=full is None):
                    return await runtime.terminal.run(frames, show, args=args)
            finally:
                self._hold.meter.note_change()
