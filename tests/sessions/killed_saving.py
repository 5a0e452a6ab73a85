"""A server that saves or restores a chat, and is killed at one step of that.

python -m tests.sessions.killed_saving CONFIGURATION STEP
"""

import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, SessionsConfig
from mcp_sandbox.models import ChatId, Packed
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.sessions.saving import Saving
from mcp_sandbox.storage import descent
from mcp_sandbox.storage.backups import Backup, Backups
from mcp_sandbox.storage.objects import ObjectStore
from mcp_sandbox.workspace import directory

SAVING = ("noted", "packing", "uploaded", "stored", "saved", "pruning")
RESTORING = ("unpacking", "unpacked", "thrown away", "home moved", "workspace moved")
CHAT = ChatId("ann", "c1")
# What is left ends itself soon, so that the test sees that it does.
ORPHANED_S = 2.0


class Dying:
    """Kills this process once it has come to a step."""

    def __init__(self, step: str) -> None:
        assert step in SAVING + RESTORING
        self._step = step

    def at(self, step: str) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, room: Any, name: str, step: str) -> None:
        """Die when this is called."""
        work = getattr(room, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(step)
            return work(*args, **kwargs)

        setattr(room, name, watched)

    def after(self, room: Any, name: str, step: str) -> None:
        """Die when this has returned; `step` may name its second argument."""
        work = getattr(room, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = work(*args, **kwargs)
            self.at(step.format(args[1].decode() if isinstance(args[1], bytes) else ""))
            return result

        setattr(room, name, watched)

    def watch(self) -> None:
        """Look at each step that leaves a trace outside of this process."""
        pack, read, delete = Files.pack, Backups.read, ObjectStore.delete

        async def packed(
            files: Files, take: Callable[[bytes], Awaitable[None]], **kwargs: Any
        ) -> Packed:
            async def taken(data: bytes) -> None:
                await take(data[: len(data) // 2])
                self.at("packing")
                await take(data[len(data) // 2 :])

            return await pack(files, taken, **kwargs)

        async def half_read(backups: Backups, backup: Backup) -> AsyncGenerator[bytes]:
            async for piece in read(backups, backup):
                yield piece[: len(piece) // 2]
                # Until the sandbox has it.
                await anyio.sleep(0.05)
                self.at("unpacking")
                yield piece[len(piece) // 2 :]

        async def half_deleted(store: ObjectStore, names: list[str]) -> None:
            await delete(store, names[:1])
            self.at("pruning")
            await delete(store, names[1:])

        Files.pack, Backups.read, ObjectStore.delete = packed, half_read, half_deleted  # type: ignore[assignment,method-assign]
        self.before(ObjectStore, "writing", "noted")
        self.before(ObjectStore, "put_small", "uploaded")
        self.before(descent, "note_saved", "stored")
        self.before(Saving, "_note", "saved")
        self.before(directory.Workspaces, "replace", "unpacked")
        self.after(directory, "throw_away", "thrown away")
        self.after(directory, "rename_new", "{} moved")


async def main(config: Config, step: str) -> None:
    Dying(step).watch()
    sessions = SessionsConfig(orphaned=ORPHANED_S)
    async with open_manager(config.model_copy(update={"sessions": sessions})) as manager:
        session = await manager.session(CHAT)
        if step in SAVING:
            await session.exec("echo 2 > note; echo 2 > ~/note")
            sys.stdout.write("written\n")
            sys.stdout.flush()
            await manager.backups.save(CHAT)
        else:
            await session.exec("true")


if __name__ == "__main__":
    anyio.run(main, Config.model_validate_json(sys.argv[1]), sys.argv[2])
