"""A backend that makes no sandboxes: sessions exist, and work in them is refused in words."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from mcp_sandbox.errors import BackendUnavailable, SandboxGone
from mcp_sandbox.models import BackendName, SandboxId, SandboxInfo, SandboxSpec


class NoopBackend:
    """It has no sandboxes, and makes none."""

    name: BackendName = "noop"

    async def probe(self) -> str:
        return "no sandboxes are made here"

    async def origin(self, image: str = "") -> str:
        return image

    async def create(self, spec: SandboxSpec) -> NoReturn:  # noqa: ARG002 - as others have it
        """Raise BackendUnavailable."""
        raise BackendUnavailable(
            "this server makes no sandboxes (backend: noop), so nothing can run here and there are "
            "no files: go on without them, or have the operator name another backend"
        )

    async def attach(self, sandbox_id: SandboxId) -> NoReturn:
        """Raise SandboxGone."""
        raise SandboxGone(f"there is no sandbox {sandbox_id}: backend noop has none")

    async def relabel(self, sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:  # noqa: ARG002
        await self.attach(sandbox_id)

    async def running(self) -> Sequence[SandboxInfo]:
        return ()

    async def destroy(self, sandbox_id: SandboxId) -> None:
        """Do nothing: none is there."""
