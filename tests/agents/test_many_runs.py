"""Eight chats have their agents work at once, and are struck at random: no run hears of another."""

import random

import anyio
import pytest

from mcp_sandbox.agents.events import Completion, Event, Progress, Text
from mcp_sandbox.app import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session
from tests.agents.test_run import asked, assert_nothing_is_left, prepared, working
from tests.e2e.attacks import on_bubblewrap

CHATS, ROUNDS, WORDS = 8, 5, 40


async def struck(session: Session, mark: str, blow: str) -> tuple[list[Event], bool]:
    """The events of a run that is struck in its midst, and whether it was cancelled."""
    code = f"[talk('{mark}') for _ in range({WORDS})]; " + ("time.sleep(99)" if blow else "end()")
    events: list[Event] = []
    async with working(session) as agent:
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


async def work(session: Session, blows: random.Random) -> None:
    for number in range(ROUNDS):
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


@on_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_runs_at_once_are_apart_and_leave_nothing(config: Config) -> None:
    async with open_manager(config) as manager:
        sessions = [await manager.session(ChatId("tester", f"many-{n}")) for n in range(CHATS)]
        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(prepared, session)
        async with anyio.create_task_group() as tasks:
            for seed, session in enumerate(sessions):
                tasks.start_soon(work, session, random.Random(seed))
