"""A server in a process of its own: opens one chat from many tasks, says in which sandbox, waits.

Arguments: place, configuration, number of tasks. One line on standard output, then it waits for
the end of standard input.
"""

import json
import sys
from contextlib import nullcontext

import anyio
from anyio import to_thread

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from tests.holding import holding_files

CHAT = ChatId("tester", "raced")


async def main(config: Config, tasks: int) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        answers: list[str] = []

        async def ask(number: int) -> None:
            answers.append((await session.exec(f"echo {number} >> asked; echo ok")).stdout)

        await to_thread.run_sync(sys.stdin.readline)
        async with anyio.create_task_group() as group:
            for number in range(tasks):
                group.start_soon(ask, number)
        (row,) = await manager.list()
        sys.stdout.write(json.dumps([row.sandbox_id, answers]) + "\n")
        sys.stdout.flush()
        await to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    given = Config.model_validate_json(sys.argv[2])
    with holding_files() if sys.argv[1] == "holding" else nullcontext():
        anyio.run(main, given, int(sys.argv[3]))
