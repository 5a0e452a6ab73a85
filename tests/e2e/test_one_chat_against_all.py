"""While one chat does its worst, each answer of another is right, and comes."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import anyio
import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.doors import Chat, Served, placed, served
from tests.e2e.hostile import LASTS_S, ON_DOCKER, THINGS, Hostile
from tests.world import World

pytestmark = pytest.mark.timeout(90)
# An answer that takes longer does not come; a call takes milliseconds.
ANSWER_S = 10


@pytest.fixture(scope="module")
async def attacked(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Served]:
    """A daemon with all that it grades and records, and the chat that works."""
    where = placed(world, tmp_path_factory.mktemp("attacked"), request.param)
    async with served(
        world, replace(where, more={"MCP_SANDBOX_POLICY__PROFILE": "isolated"}), request.param
    ) as opened:
        yield opened


async def work(chat: Chat, turn: int) -> None:
    """A turn of the chat that works: each answer is what it has to be."""
    with anyio.fail_after(ANSWER_S):
        assert await chat.bash(f"echo {turn}") == f"{turn}\n"
    with anyio.fail_after(ANSWER_S):
        assert await chat.python(f"print({turn} * 7)") == f"{turn * 7}\n"
    with anyio.fail_after(ANSWER_S):
        await chat.call("write_file", path="turn", content=f"{turn}\n" * 5)
        assert f"{turn}" in await chat.call("read_file", path="turn")


async def goes_on(thing: str, attacked: Served) -> None:
    """Have one chat do a thing, and the other work until it has ended, and once more."""
    ended = anyio.Event()

    async def do() -> None:
        async with attacked.other(f"hostile-{thing}") as chat:
            with anyio.move_on_after(5 * LASTS_S):
                await THINGS[thing](Hostile(chat, attacked.place, attacked.world))
        ended.set()

    turn = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(do)
        while not ended.is_set():
            turn += 1
            await work(attacked.chat, turn)
    await work(attacked.chat, turn + 1)


@pytest.mark.parametrize("attacked", [BUBBLEWRAP], indirect=True, scope="module")
@pytest.mark.parametrize("thing", THINGS)
async def test_another_chat_is_answered_while_one_does_this(attacked: Served, thing: str) -> None:
    await goes_on(thing, attacked)


@pytest.mark.parametrize("attacked", [DOCKER], indirect=True, scope="module")
@pytest.mark.parametrize("thing", ON_DOCKER)
async def test_another_container_is_answered_while_one_does_this(
    attacked: Served, thing: str
) -> None:
    await goes_on(thing, attacked)
