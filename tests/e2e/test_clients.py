"""Real clients of `mcp-sandbox stdio`: how they are served, and how the server leaves."""

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from mcp import Client, StdioServerParameters
from mcp.types import LATEST_PROTOCOL_VERSION

from mcp_sandbox.config import server_variables
from tests import forked
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, if_whole
from tests.e2e.endurance.places import Place
from tests.server.scripted import text_of
from tests.server.test_stdio import INITIALIZE, RawClient
from tests.server.test_tools import TABLE

ROOT = Path(__file__).parents[2]
IDLE_S = 2
GONE_S = 40

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(params=[DOCKER, BUBBLEWRAP])
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(backend_name: str, data_root: Path) -> StdioServerParameters:
    arguments = ["-m", "mcp_sandbox", "stdio", "--chat", "client"]
    arguments += ["--data", str(data_root), "--backend", backend_name]
    settings = {"MCP_SANDBOX_SESSIONS__ORPHANED": f"{IDLE_S}s"}
    return StdioServerParameters(
        command=sys.executable, args=arguments, env={**server_variables(), **settings}, cwd=ROOT
    )


@pytest.fixture
def place(backend_name: str, data_root: Path) -> Place:
    return Place(data_root, backend_name, set())


@asynccontextmanager
async def started(server: StdioServerParameters) -> AsyncGenerator[RawClient]:
    with anyio.fail_after(120):
        async with forked.start(
            server.args[2:],
            env={**os.environ, **(server.env or {})},
            cwd=str(ROOT),
            stdin=None,
        ) as process:
            try:
                yield RawClient(process)
            finally:
                if process.returncode is None:
                    process.kill()


@asynccontextmanager
async def connected(server: StdioServerParameters) -> AsyncGenerator[RawClient]:
    async with started(server) as client:
        await client.answer(await client.request("initialize", INITIALIZE))
        await client.notify("notifications/initialized", {})
        yield client


async def begin_endless_call(client: RawClient) -> None:
    """Start a command that never ends; returns when it has begun."""
    command = "setsid sleep 1000 & echo begun; sleep 1000"
    params: dict[str, Any] = {"name": "exec", "arguments": {"command": command}}
    await client.request("tools/call", {**params, "_meta": {"progressToken": "p"}})
    while "begun" not in str((await client.receive()).get("params", {}).get("message")):
        pass


async def all_gone(place: Place, *kinds: str) -> dict[str, int]:
    """What is left of these kinds, or of all: looked at until it is nothing or time is up."""
    with anyio.move_on_after(GONE_S):
        while any(left := await to_thread.run_sync(remains, place, kinds)):
            await anyio.sleep(0.1)
    return left


def remains(place: Place, kinds: tuple[str, ...]) -> dict[str, int]:
    found = place.remains()
    return {kind: found[kind] for kind in kinds or found if found[kind]}


def in_each(names: tuple[str, ...], cases: Sequence[tuple[object, ...]]) -> pytest.MarkDecorator:
    """All cases in bubblewrap and the last on docker; with --whole all on both."""
    places = [(BUBBLEWRAP, case) for case in cases]
    places += [(if_whole(DOCKER), case) for case in cases[:-1]] + [(DOCKER, cases[-1])]
    return pytest.mark.parametrize(
        ("backend_name", *names),
        [pytest.param(*place.values, *case, marks=place.marks) for place, case in places],
        indirect=["backend_name"],
    )


@in_each(
    ("mode", "spoken"),
    [("legacy", "2025-11-25"), ("auto", LATEST_PROTOCOL_VERSION)],
)
async def test_the_sdk_client_works_in_both_eras(
    server: StdioServerParameters, mode: str, spoken: str, place: Place
) -> None:
    with anyio.fail_after(120):
        async with Client(server, mode=mode) as client:
            assert client.protocol_version == spoken
            tools = [tool.name for tool in (await client.list_tools()).tools]
            assert tools == [*TABLE, "skills_list", "skill_activate"]
            ran = await client.call_tool("run_code", {"code": "print(6 * 7)"})
            assert text_of(ran) == "42\n"
            await client.call_tool("write_file", {"path": "a", "content": "kept"})
            await to_thread.run_sync(place.note)
        async with Client(server, mode=mode) as client:
            assert text_of(await client.call_tool("read_file", {"path": "a"})) == "     1\tkept"
    assert await all_gone(place) == {}


async def test_a_client_that_writes_its_own_json_works(server: StdioServerParameters) -> None:
    async with connected(server) as client:
        result = await client.call("exec", {"command": "cat", "stdin": "ab\ncd\n"})
        assert result["content"][0]["text"] == "ab\ncd\n"
        await client.stdin.aclose()
        assert await client.process.wait() == 0


async def end_of_input(client: RawClient) -> None:
    await client.stdin.aclose()


async def interrupt(client: RawClient) -> None:
    client.process.send_signal(signal.SIGINT)


async def terminate(client: RawClient) -> None:
    client.process.send_signal(signal.SIGTERM)


async def interrupt_and_terminate(client: RawClient) -> None:
    client.process.send_signal(signal.SIGINT)
    # This is what coding agents do: they do not wait for the first to have an effect.
    await anyio.sleep(0.1)
    if client.process.returncode is None:
        client.process.send_signal(signal.SIGTERM)


FAREWELLS = [end_of_input, interrupt, terminate, interrupt_and_terminate]


@in_each(("farewell",), [(farewell,) for farewell in FAREWELLS])
async def test_a_server_that_is_told_to_go_takes_everything_with_it(
    server: StdioServerParameters, place: Place, farewell: Callable[[RawClient], Any]
) -> None:
    async with connected(server) as client:
        await begin_endless_call(client)
        await to_thread.run_sync(place.note)
        assert len(place.known) >= 1
        await farewell(client)
        code = await client.process.wait()
        for line in (await client.rest_of_stdout()).splitlines():
            assert json.loads(line)["jsonrpc"] == "2.0"
    assert await all_gone(place) == {}
    assert code == 0


@in_each(("farewell",), [(end_of_input,), (interrupt_and_terminate,)])
async def test_a_server_that_is_told_to_go_while_it_makes_a_sandbox_leaves_nothing(
    server: StdioServerParameters, place: Place, farewell: Callable[[RawClient], Any]
) -> None:
    async with connected(server) as client:
        await client.request("tools/call", {"name": "exec", "arguments": {"command": "true"}})
        with anyio.fail_after(30):
            while not await to_thread.run_sync(note, place):
                await anyio.sleep(0.005)
        await farewell(client)
        assert await client.process.wait() == 0
    assert await all_gone(place) == {}


def note(place: Place) -> bool:
    place.note()
    return bool(place.known)


async def test_a_sandbox_whose_server_was_killed_ends_itself(
    server: StdioServerParameters, place: Place
) -> None:
    async with connected(server) as client:
        await begin_endless_call(client)
        await to_thread.run_sync(place.note)
        client.process.kill()
        await client.process.wait()
    running = await all_gone(place, "processes", "containers", "mounts")
    assert running == {}


@pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)
async def test_an_interrupt_at_any_moment_of_the_start_leaves_no_traceback(
    server: StdioServerParameters, place: Place
) -> None:
    """Clients give up at any moment; in these the process may still be importing."""
    for delay_s in (0.15, 0.3, 0.5, 0.8):
        async with await anyio.open_process(
            [server.command, *server.args], cwd=ROOT, env={**os.environ, **(server.env or {})}
        ) as process:
            assert process.stdin
            assert process.stderr
            await anyio.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            with anyio.fail_after(20):
                told = b"".join([piece async for piece in process.stderr])
                assert await process.wait() in (0, -signal.SIGINT), delay_s
            assert b"Traceback" not in told, (delay_s, told.decode())
    assert await all_gone(place) == {}
