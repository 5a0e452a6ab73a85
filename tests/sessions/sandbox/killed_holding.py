"""A server whose sandboxes hold files, and that is killed before or after one of its steps.

python -m tests.sessions.sandbox.killed_holding BACKEND CONFIGURATION STEP; it prints what it was
told of, and ends by itself where there are not so many steps.
"""

import os
import signal
import sys
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.backends.e2b.client import Box, Client
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.sessions.chat_records import ChatRecords
from mcp_sandbox.storage.objects import ObjectStore
from tests.daemon.running import ended
from tests.holding import HeldSandbox, HoldingBackend, holding_files

CHAT = ChatId("ann", "c1")
MOST_STEPS = 87
WATCHED: list[tuple[type, tuple[str, ...]]] = [
    (HoldingBackend, ("_start", "destroy")),
    (HeldSandbox, ("pause",)),
    (Client, ("create", "connect", "pause", "kill")),
    (Box, ("write", "run")),
    (Files, ("mark", "pack", "unpack")),
    (ObjectStore, ("put_small",)),
    (ChatRecords, ("put",)),
]


class Dying:
    """Kills this process at one of its steps, which it counts."""

    def __init__(self, step: int) -> None:
        self.left = step

    def at(self, what: str) -> None:
        self.left -= 1
        if self.left == 0:
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, room: type, name: str) -> None:
        work = getattr(room, name)

        async def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(f"before {name}")
            result = await work(*args, **kwargs)
            self.at(f"after {name}")
            return result

        setattr(room, name, watched)


async def main(name: str, config: Config, step: int) -> None:
    dying = Dying(step)
    for room, names in WATCHED:
        for each in names:
            dying.watch(room, each)
    with ExitStack() as stack:
        if name == "holding":
            stack.enter_context(holding_files())
        async with open_manager(config) as manager:
            session = await manager.session(CHAT)

            async def write(number: int) -> None:
                await session.exec(f"echo {number} > note; echo {number} > ~/note")
                sys.stdout.write(f"{number}\n")
                sys.stdout.flush()

            await write(2)
            await manager.backups.save(CHAT)
            await write(3)
            await manager.pause(CHAT)
            await write(4)
            await manager.stop(CHAT)
            await write(5)
    sys.stderr.write(f"there are {step - dying.left} steps\n")


async def try_kill(name: str, config: Config, step: int) -> None:
    """Kill such a server at a step, and see that the next one has all that was written."""
    async with open_manager(config) as first:
        await (await first.session(CHAT)).exec("echo 1 > note; echo 1 > ~/note")
    words = [name, config.model_dump_json(), str(step)]
    killed = await ended(words, env=os.environ, module=__name__)
    assert killed.code in (0, -signal.SIGKILL), killed.err
    written = max(map(int, killed.out.split()), default=1)
    async with open_manager(config) as again:
        session = await again.session(CHAT)
        seen = (await session.exec("cat note ~/note; ls -A")).stdout
        note, own, *names = seen.split()
        # What was under way may have been done.
        assert {int(note), int(own)} <= {written, written + 1}, killed.err
        assert names == ["note"]
        await again.stop(CHAT)
        assert config.backend != "auto"
        async with open_backend(config.backend, config) as backend:
            assert not await backend.running()
        assert (await session.exec("cat note ~/note; ls -A")).stdout == seen


# The others with --whole; there are no more than these.
STEPS = [
    pytest.param(step, marks=() if step in (9, 24, 40) else pytest.mark.whole)
    for step in range(1, MOST_STEPS)
]


if __name__ == "__main__":
    given = Config.model_validate_json(sys.argv[2])
    anyio.run(main, sys.argv[1], given, int(sys.argv[3]))
