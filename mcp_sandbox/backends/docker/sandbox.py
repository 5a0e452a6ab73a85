"""A container, seen from the host."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from anyio.abc import ByteStream

from mcp_sandbox.backends.docker.life import Life
from mcp_sandbox.models import Ending, SandboxFacts, SandboxId


@dataclass(frozen=True)
class DockerSandbox:
    """`connect` opens a byte stream to its runner."""

    id: SandboxId
    token: bytes
    facts: SandboxFacts
    labels: Mapping[str, str]
    life: Life
    connect: Callable[[], Awaitable[ByteStream]]

    async def open_channel(self) -> ByteStream:
        """Connect to the runner.

        Raises:
            SandboxGone: it does not run or does not listen.
        """
        return await self.connect()

    async def pause(self) -> bool:
        """Stop all that runs in it, until `resume`.

        Raises:
            SandboxGone: it does not run.
            BackendUnavailable: the engine cannot do it.
        """
        await self.life.pause(self.id)
        return True

    async def resume(self) -> None:
        """Let it go on; one that is not paused is fine.

        Raises:
            SandboxGone: it does not run.
        """
        await self.life.resume(self.id)

    async def ending(self, *, within_s: float = 0.0) -> Ending | None:
        """What it ended of; None if it still runs after `within_s`."""
        return await self.life.ending(self.id, within_s)
