"""A server that gives a new chat a warm sandbox, and is killed at one step of that.

python -m tests.contract.killed_adoption CONFIGURATION STEP
"""

import os
import signal
import sys
from collections.abc import Mapping

import anyio

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.backends.base import Pooled
from mcp_sandbox.config import Config, PoolConfig, SessionsConfig
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.workspace import pool
from mcp_sandbox.workspace.beneath import rename_new

STEPS = ("taken", "relabelled", "home moved", "workspace moved", "answered")
CHAT = ChatId("ann", "c1")
# What is left ends itself soon, so that the test sees that it does.
ORPHANED_S = 2.0


class Dying:
    """Kills this process once it has come to a step."""

    def __init__(self, step: str) -> None:
        assert step in STEPS
        self._step = step

    def at(self, step: str) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, manager: SessionManager) -> None:
        """Look at each step that leaves a trace outside of this process."""
        pool.rename_new = self._rename  # type: ignore[assignment,attr-defined]
        backend = manager._context.backend
        assert isinstance(backend, Pooled)
        relabel = backend.relabel

        async def watched(sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:
            self.at("taken")
            await relabel(sandbox_id, labels)
            self.at("relabelled")

        backend.relabel = watched  # type: ignore[method-assign]

    def _rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        rename_new(parent, name, new_parent, new_name)
        if new_name.startswith(b"chat-"):
            self.at(f"{name.decode()} moved")


async def main(config: Config, step: str) -> None:
    settings = {"pool": PoolConfig(size=1), "sessions": SessionsConfig(orphaned=ORPHANED_S)}
    dying = Dying(step)
    async with open_manager(config.model_copy(update=settings)) as manager:
        dying.watch(manager)
        with anyio.fail_after(20):
            while manager.statistics().pool["idle"] < 1:
                await anyio.sleep(0.02)
        session = await manager.session(CHAT)
        result = await session.exec("echo kept > note; echo kept > ~/note; echo done")
        hits = manager.statistics().pool["hits"]
        sys.stdout.write(f"{result.stdout}{hits}\n")
        sys.stdout.flush()
        dying.at("answered")


if __name__ == "__main__":
    anyio.run(main, Config.model_validate_json(sys.argv[1]), sys.argv[2])
