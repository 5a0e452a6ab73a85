"""What earlier commands have left running gives way when a call needs the room."""

from collections.abc import AsyncGenerator

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT

_PLACES = 256
_WITHOUT_LIMIT = {
    "docker-runsc": "gVisor's limit is one of its own threads, not of the processes inside",
    "unsafe-local": "its processes are counted with those of the machine",
    "e2b": "the limits of its template hold, and no others",
}
_PIPELINE = "true" + " | cat" * 13
_COUNT = "ls -d /proc/[0-9]* | wc -l"


@pytest.fixture
async def session(config: Config, backend_name: str) -> AsyncGenerator[Session]:
    """A chat whose sandbox has few places for processes."""
    if reason := _WITHOUT_LIMIT.get(backend_name):
        pytest.skip(reason)
    limits = config.limits.model_copy(update={"pids": _PLACES})
    async with open_manager(config.model_copy(update={"limits": limits})) as manager:
        yield await manager.session(CHAT)


async def leave(session: Session, count: int, seconds: int) -> None:
    """Leave so many processes running, each of which has become its program."""
    start = f"for i in {{1..{count}}}; do sleep {seconds} & done"
    running = f"$(pgrep -fc '^sleep {seconds}')"
    result = await session.exec(
        f"{start}; until [ {running} = {count} ]; do sleep 0.05; done", timeout_s=20
    )
    assert (result.exit_code, result.stderr) == (0, "")


async def test_the_largest_tree_gives_way_and_the_result_names_it(session: Session) -> None:
    await leave(session, 75, 86371)
    await leave(session, 150, 86372)
    result = await session.exec(f"{_PIPELINE}; pgrep -fc '^sleep 86371'; {_COUNT}")
    left, taken = map(int, result.stdout.split())
    assert (result.exit_code, result.stderr, left) == (0, "", 75)
    assert taken < _PLACES - 64
    assert result.made_room.total == 150
    assert {each.command for each in result.made_room.processes} == {"sleep 86372"}
    assert (await session.exec("true")).made_room.total == 0


async def test_trees_give_way_until_64_places_are_free(session: Session) -> None:
    for number in range(5):
        await leave(session, 44, 86380 + number)
    code = f"import subprocess; print(subprocess.getoutput({_COUNT!r}))"
    result = await session.run_code(code)
    assert int(result.stdout) <= _PLACES - 64
    assert result.made_room.total == 44


async def test_what_leaves_room_is_let_alone(session: Session) -> None:
    await leave(session, 120, 86373)
    assert (await session.exec(_PIPELINE)).made_room.total == 0
    assert (await session.exec("pgrep -fc '^sleep 86373'")).stdout == "120\n"


@pytest.mark.slow
async def test_a_call_under_way_is_let_alone(session: Session) -> None:
    await leave(session, 100, 86374)
    async with anyio.create_task_group() as tasks:
        under_way = anyio.Event()

        async def work() -> None:
            async def note(_name: str, _data: bytes) -> None:
                under_way.set()

            code = "for i in {1..120}; do sleep 3 & done; echo started; wait; echo ended"
            result = await session.exec(code, on_output=note)
            assert result.stdout == "started\nended\n"

        tasks.start_soon(work)
        await under_way.wait()
        assert (await session.exec(_PIPELINE)).made_room.total == 100
