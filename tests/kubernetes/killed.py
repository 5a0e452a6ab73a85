"""A server that does one thing to its chat, to be killed meanwhile.

python -m tests.kubernetes.killed CONFIG WHAT
"""

import sys

import anyio

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId

CHAT = ChatId("tester", "killed")


async def main(config: Config, what: str) -> None:
    async with open_manager(config, for_many=bool(config.fleet.name)) as manager:
        session = await manager.session(CHAT)
        if what != "create":
            assert (await session.exec("echo kept > file; head -c 30M /dev/urandom > big")).success
            if what == "adopt":
                await manager.stop(CHAT)
            sys.stdout.write("written\n")
            sys.stdout.flush()
            # What follows is killed, wherever the test says.
            await anyio.to_thread.run_sync(sys.stdin.readline)
        if what == "save":
            assert manager.saving
            await manager.saving.save(CHAT)
        elif what == "suspend":
            await manager.pause(CHAT)
        elif what == "delete":
            await manager.remove(CHAT)
        else:
            await session.exec("true")
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Config.model_validate_json(sys.argv[1]), sys.argv[2])
