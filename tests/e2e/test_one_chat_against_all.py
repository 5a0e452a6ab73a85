"""While one chat does its worst, each answer of another is right, and comes."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.models import ChatId
from tests.conftest import configured
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.doors import Chat, Served, placed, served
from tests.e2e.hostile import LASTS_S, ON_DOCKER, THINGS, Hostile
from tests.streams import printing
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
        await work(opened.chat, 0)
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
        async with attacked.other(f"hostile-{thing}") as chat:
            # Its line may be broken by what it has sent; what it began goes with its sandbox.
            await chat.call("sandbox_reset")
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


FLOODS = {
    "output": "while True: print('x' * 8191)",
    "short-lines": "import os\nwhile True: os.write(1, b'\\n')",
    "files": "for n in range(10**6): open(f'f{n}', 'w').close()",
    "door": (
        "import socket\n"
        "while True:\n"
        "    with socket.create_connection(('127.0.0.1', 17329)) as line:\n"
        "        line.sendall(b'CONNECT a.example.net:443 HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n')\n"
        "        while line.recv(65536): pass\n"
    ),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many steps the event loop here has taken."""
    count, run_step = itertools.count(), asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        next(count)
        run_step(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", run)
    return lambda: next(count)


@pytest.mark.alone
@pytest.mark.bubblewrap
@pytest.mark.parametrize("flood", FLOODS)
async def test_few_steps_of_others_come_before_an_answer(
    data_root: Path, counted: Callable[[], int], flood: str
) -> None:
    config = configured("bubblewrap", data_root)
    egress = config.egress.model_copy(update={"allow": ("packages",)})
    behind_a_door = config.model_copy(update={"network": "allowlist", "egress": egress})
    async with open_manager(behind_a_door) as manager:
        one, other = [await manager.session(ChatId("u", name)) for name in ("one", "other")]

        async def steps() -> int:
            """Those that all but one of a hundred calls stay under."""
            found = []
            for _ in range(100):
                before = counted()
                await one.exec("true")
                found.append(counted() - before)
            return sorted(found)[-2]

        await steps()
        quiet = await steps()
        async with printing(other, ["python3", "-uc", f"print('begun')\n{FLOODS[flood]}"]):
            # While the machine has no core for the chat's own sandbox, the flood goes on.
            assert min([await steps() for _ in range(3)]) <= 5 * quiet
