"""Eight chats have their agents work at once, and are struck at random: no run hears of another."""

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.agents.events import Completion, Event, Progress, Text
from mcp_sandbox.agents.executors.base import ModelAccess
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.agents.run import Agent, Tell
from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session
from tests.agents.test_run import PLAIN, asked, assert_nothing_is_left, prepared
from tests.e2e.attacks import on_docker_if_whole

CHATS, WORDS = 8, 40
# It says what it is told at its way out.
CODE = (
    "import socket; port = int(os.environ['ANTHROPIC_BASE_URL'].rpartition(':')[2]);"
    "mark = socket.create_connection(('127.0.0.1', port)).makefile().read();"
    f"[talk(mark) for _ in range({WORDS})]; "
)
LISTENERS = "awk '$4 == \"0A\"' /proc/net/tcp"


@asynccontextmanager
async def way_out(session: Session, mark: str, _tell: Tell) -> AsyncGenerator[ModelAccess]:
    async def answer(stream: ByteStream) -> None:
        async with stream:
            await stream.send(mark.encode())

    async with session.door(answer) as port:
        yield ModelAccess(f"http://127.0.0.1:{port}", "token", "test-model")


async def struck(session: Session, mark: str, blow: str) -> tuple[list[Event], bool]:
    """The events of a run that is struck in its midst, and whether it was cancelled."""
    code = CODE + ("time.sleep(99)" if blow else "end()")
    events: list[Event] = []
    way = partial(way_out, session, mark)
    agent = Agent(session.chat, session, PLAIN, Claude, way, 60)
    async with agent.opened():
        with anyio.CancelScope() as scope:
            async for event in agent.stream(asked(code)):
                if isinstance(event, Progress):
                    continue
                events.append(event)
                if len(events) == WORDS and blow == "cancel":
                    scope.cancel()
                elif len(events) == WORDS and blow == "kill":
                    await session.exec("pkill -9 -f bin/claude")
                elif len(events) == WORDS and blow == "reset":
                    await session.reset()
    return events, scope.cancelled_caught


async def work(session: Session, blows: random.Random, rounds: int) -> None:
    for number in range(rounds):
        mark = f"{session.chat.chat}-{number}"
        blow = blows.choice(["", "", "cancel", "kill", "reset"])
        events, cancelled = await struck(session, mark, blow)
        assert events[:WORDS] == [Text(mark, partial=True)] * WORDS
        assert cancelled == (blow == "cancel")
        if not cancelled:
            (last,) = events[WORDS:]
            assert isinstance(last, Completion)
            assert last.is_error == bool(blow)
            assert last.content == (mark * WORDS if blow else "done")
    await assert_nothing_is_left(session)
    assert (await session.exec(LISTENERS)).stdout == ""


@on_docker_if_whole
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_runs_at_once_are_apart_and_leave_nothing(
    config: Config, request: pytest.FixtureRequest
) -> None:
    rounds = 20 if request.config.getoption("--whole") else 5
    async with open_manager(config) as manager:
        sessions = [await manager.session(ChatId("tester", f"many-{n}")) for n in range(CHATS)]
        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(prepared, session)
        async with anyio.create_task_group() as tasks:
            for seed, session in enumerate(sessions):
                tasks.start_soon(work, session, random.Random(seed), rounds)
