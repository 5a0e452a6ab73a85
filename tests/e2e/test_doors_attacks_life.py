"""What is connected ends when its server or its sandbox does; the next connection works."""

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import Place, command, control, in_chat, listening, running, starting
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.doors import CHAT, PLAIN, Chat, placed
from tests.world import World

pytestmark = pytest.mark.timeout(120)
FETCH = f"curl -sS https://{PLAIN}/a"
FETCHED = '"path": "/a"'
# A download that goes on until somebody ends it, and how it ended.
DOWNLOAD = (
    f"(curl -s -D head https://{PLAIN}/endless; echo $? > ended) >/dev/null 2>&1 & "
    "until [ -s head ]; do sleep 0.05; done"
)
ENDED = "until [ -s ended ]; do sleep 0.05; done; cat ended; rm -f ended head"


@pytest.fixture(params=[DOCKER, BUBBLEWRAP])
def where(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Place:
    """A place for daemons of a test's own."""
    return placed(world, tmp_path, request.param, {"pool": {"size": 0}})


@asynccontextmanager
async def chatting(where: Place) -> AsyncGenerator[Chat]:
    async with in_chat(where, CHAT) as client:
        yield Chat(client)


async def test_a_download_ends_with_a_daemon_that_is_killed_and_the_next_one_serves(
    where: Place,
) -> None:
    with anyio.fail_after(100):
        async with starting(where) as first:
            await listening(where)
            async with chatting(where) as chat:
                await chat.bash(DOWNLOAD)
                # Without a server a client is refused at once, and never left hanging.
                await chat.bash(
                    f"(while sleep 0.1; do curl -s -m 5 -o /dev/null https://{PLAIN}/a; "
                    "echo $? >> codes; done) >/dev/null 2>&1 & echo $! > pid"
                )
                [pid] = [each for each in children(first.process.pid) if is_ways_out(each)]
                first.process.kill()
                await first.process.wait()
                while Path(f"/proc/{pid}/exe").exists():
                    await anyio.sleep(0.05)
        codes = await _file(where, "codes")
        while "7" not in codes.read_text().split():
            await anyio.sleep(0.05)
        async with running(where), chatting(where) as chat:
            assert (await chat.bash(ENDED)).splitlines()[0] not in ("0", "")
            assert FETCHED in await chat.bash(f"kill $(cat pid); {FETCH}; cat codes > /dev/null")
            # 28 is the end of curl's patience.
            assert "28" not in (await chat.bash("cat codes; rm codes")).split()


async def _file(where: Place, name: str) -> Path:
    """A file of the chat's workspace, once it is there."""
    found = where.data / "sandbox" / "workspace" / "local" / f"chat-{CHAT}" / name
    while not found.exists():
        await anyio.sleep(0.05)
    return found


async def test_the_next_of_two_servers_takes_over(where: Place) -> None:
    with anyio.fail_after(100):
        async with running(where) as old, chatting(where) as chat:
            slow = "touch begun; until [ -e done ]; do sleep 0.05; done; " + FETCH
            number = await chat.client.request(
                "tools/call", {"name": "exec", "arguments": {"command": slow}}
            )
            begun = await _file(where, "begun")
            assert await control(where, "hand-over") == {"result": {}}
            async with running(where), chatting(where) as later:
                # The chat is the old server's until its call ends, and so are its connections.
                assert FETCHED in await later.bash(FETCH)
                (begun.parent / "done").touch()
                answer = await chat.client.answer(number)
                assert FETCHED in answer["result"]["content"][0]["text"]
                assert await old.end() == 0
                assert FETCHED in await later.bash(FETCH)


async def test_a_port_that_user_code_takes_first_harms_its_own_chat_alone(where: Place) -> None:
    taking = (
        "import socket, time\n"
        "while True:\n"
        "    try:\n"
        "        line = socket.create_server(('127.0.0.1', 17329))\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.01)\n"
        "open('taken', 'w').write('x')\n"
        "time.sleep(600)\n"
    )
    with anyio.fail_after(100):
        async with starting(where) as first:
            await listening(where)
            async with chatting(where) as chat:
                await chat.call("write_file", path="taking.py", content=taking)
                await chat.bash("nohup python3 taking.py >/dev/null 2>&1 & echo $! > pid")
                first.process.kill()
                await first.process.wait()
        await _file(where, "taken")
        async with running(where), chatting(where) as chat:
            said = await chat.bash(f"echo works; curl -sS -m 2 https://{PLAIN}/a || echo $?")
            assert said.startswith("works")
            assert FETCHED not in said
            async with in_chat(where, "other") as client:
                assert FETCHED in await Chat(client).bash(FETCH)
            await chat.bash("kill $(cat pid)")
            with anyio.fail_after(20):
                while FETCHED not in await chat.bash(f"{FETCH} 2>&1; true"):
                    await anyio.sleep(0.1)


async def test_a_reset_ends_what_is_connected_and_the_grants_go_with_the_files(
    where: Place,
) -> None:
    host = "later.example.com"
    with anyio.fail_after(100):
        async with running(where), chatting(where) as chat:
            await chat.bash("true")
            allowed = await command(where, "egress allow", CHAT, host, "--yes")
            assert allowed.code == 0, allowed
            await chat.bash(DOWNLOAD)
            await chat.call("sandbox_reset")
            assert FETCHED in await chat.bash(f"curl -sS https://{host}/a")
            assert FETCHED in await chat.bash(FETCH)
            await chat.call("sandbox_reset", keep_files=False)
            assert FETCHED not in await chat.bash(f"curl -sS https://{host}/a")
            assert FETCHED in await chat.bash(FETCH)


@pytest.mark.parametrize("where", [DOCKER], indirect=True)
async def test_a_pause_ends_what_is_connected_and_the_next_call_can_connect(where: Place) -> None:
    with anyio.fail_after(100):
        async with running(where), chatting(where) as chat:
            await chat.bash(DOWNLOAD)
            await control(where, "pause", chat=CHAT)
            assert (await chat.bash(ENDED)).splitlines()[0] not in ("0", "")
            assert FETCHED in await chat.bash(FETCH)


async def test_a_killed_process_of_the_ways_out_costs_open_connections_and_nothing_else(
    where: Place,
) -> None:
    with anyio.fail_after(100):
        async with running(where) as daemon, chatting(where) as chat:
            await chat.bash(f"sleep 77 >/dev/null 2>&1 & {DOWNLOAD}")
            [pid] = [each for each in children(daemon.process.pid) if is_ways_out(each)]
            os.kill(pid, signal.SIGKILL)
            said = await chat.bash(f"{ENDED}; pgrep -x sleep && pkill -x sleep")
            assert said.splitlines()[0] not in ("0", "")
            assert said.splitlines()[1].isdigit()
            told = said
            while FETCHED not in (said := await chat.bash(FETCH)):
                told += said
            assert "connections that were open are lost" in told + said
            assert [each for each in children(daemon.process.pid) if is_ways_out(each)] != [pid]


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that are there."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for file in found for each in file.read_text().split()]


def is_ways_out(pid: int) -> bool:
    return b"egress.process.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
