"""Tools of the host for programs inside: what is offered, what passes, and what cannot."""

import json
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters

from mcp_sandbox.agents.events import Event, HostTool
from mcp_sandbox.config import BridgeConfig
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.relay import inside
from mcp_sandbox.server import bridge as bridges
from mcp_sandbox.server.bridge import ToolBridge, open_bridge
from tests.server import host_tools

PROGRAM = [sys.executable, host_tools.__file__]
REVERSED = "import json, sys; print(json.dumps([*reversed(json.load(sys.stdin)['items'])]))"
SETTINGS: dict[str, Any] = {
    "servers": {"sums": {"command": PROGRAM}},
    "python": [f"{__name__}:shout", f"{__name__}:fail"],
    "processes": {
        "yao.process": {"command": [sys.executable, "-c", REVERSED], "about": "Turn it round."},
        "flood": {"command": ["cat", "/dev/zero"]},
        "slow": {"command": ["sleep", "3600"], "timeout": 0.2},
        "garbage": {"command": ["echo", "{no json"]},
        "failing": {"command": ["false"]},
    },
}


def shout(text: str) -> str:
    """In capitals."""
    return text.upper()


def fail() -> str:
    raise RuntimeError("of no concern to who is inside")


@dataclass
class Run:
    """A bridge that listens on a socket, as inside."""

    bridge: ToolBridge
    socket: Path
    told: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    def client(self, **how: Any) -> Client:
        """As an agent reaches it: by the relay that is in every sandbox."""
        given = ["-I", "-S", inside.__file__, str(self.socket)]
        return Client(StdioServerParameters(command=sys.executable, args=given), **how)

    async def call(self, name: str, **arguments: Any) -> str:
        async with self.client() as client:
            return await said(client, name, **arguments)


async def said(client: Client, name: str, **arguments: Any) -> str:
    """What the agent reads, after ! where it failed."""
    result = await client.call_tool(name, arguments)
    text = "".join(each.text for each in result.content if each.type == "text")
    return f"!{text}" if result.is_error else text


@asynccontextmanager
async def run(
    folder: Path,
    wanted: Mapping[str, Sequence[str]],
    functions: Sequence[Callable[..., Any]] = (),
    settings: Mapping[str, Any] = SETTINGS,
) -> AsyncGenerator[Run]:
    told: list[tuple[str, bool]] = []
    place = folder / "bridge.sock"

    async def tell(events: list[Event]) -> None:
        told.extend((each.name, each.is_error) for each in events if isinstance(each, HostTool))

    opening = open_bridge(BridgeConfig(**settings), wanted, functions, of="a run", tell=tell)
    async with (
        opening as bridge,
        await anyio.create_unix_listener(place) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, _handler(bridge))
        yield Run(bridge, place, told)
        tasks.cancel_scope.cancel()


def _handler(bridge: ToolBridge) -> Callable[[Any], Any]:
    async def handle(stream: Any) -> None:
        async with stream:
            await bridge.handle(stream)

    return handle


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_what_is_named_is_offered_and_answers(tmp_path: Path, mode: str) -> None:
    wanted = {"sums": ["add"], "host": ["yao.process", "shout"]}
    async with run(tmp_path, wanted) as opened, opened.client(mode=mode) as client:
        found = {each.name: each for each in (await client.list_tools()).tools}
        assert [*found] == ["sums__add", "yao.process", "shout"] == opened.bridge.names
        assert found["sums__add"].description == "Add two numbers."
        assert found["sums__add"].input_schema["required"] == ["a", "b"]
        assert await said(client, "sums__add", a=2, b=3) == "5"
        assert await said(client, "shout", text="hé") == "HÉ"
        assert json.loads(await said(client, "yao.process", items=[1, "ä"])) == ["ä", 1]
    assert opened.told == [(name, False) for name in ("sums__add", "shout", "yao.process")]


async def test_functions_of_the_embedding_program_need_no_name(tmp_path: Path) -> None:
    async with run(tmp_path, {}, [shout]) as opened:
        assert opened.bridge.names == ["shout"]
        assert await opened.call("shout", text="a") == "A"


async def test_what_is_not_named_is_not_there(tmp_path: Path) -> None:
    async with run(tmp_path, {}) as nothing:
        assert not nothing.bridge.names
    async with run(tmp_path, {"sums": ["add"]}) as opened:
        for name in ("sums__pid", "pid", "shout", "yao.process", "exec"):
            assert "There is no tool" in await opened.call(name)
        async with opened.client() as client:
            for asked in (client.list_resources, client.list_prompts):
                with pytest.raises(MCPError, match="not found"):
                    await asked()


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"sums": ["add", "multiply"]}, "sums has no tool multiply: it has add, pid"),
        ({"differences": ["a"]}, "no tools of differences .*: bridge knows host, sums"),
        ({"host": ["whisper"]}, "host has no tool whisper: it has shout, fail, yao.process"),
    ],
)
async def test_what_is_named_and_not_there_is_told_at_once(
    tmp_path: Path, wanted: dict[str, list[str]], problem: str
) -> None:
    with pytest.raises(OperatorError, match=problem):
        async with run(tmp_path, wanted):
            pass


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["false"], "Connection closed"),
        (["/no/such/program"], "No such file"),
        (["echo", "no json"], "Connection closed"),
        (["cat"], "Method not found"),
        (["sh", "-c", "read x; kill -9 $$"], "Connection closed"),
    ],
)
async def test_a_server_that_does_not_start_is_told(
    tmp_path: Path, command: list[str], why: str
) -> None:
    settings = {"servers": {"broken": {"command": command}}}
    told = rf"bridge\.servers\.broken cannot be used: .*{why}.*; see whether that is an MCP server"
    with pytest.raises(OperatorError, match=told):
        async with run(tmp_path, {"broken": ["a"]}, settings=settings):
            pass


async def test_arguments_are_checked_before_anybody_sees_them(tmp_path: Path) -> None:
    async with run(tmp_path, {"sums": ["add"], "host": ["shout"]}) as opened:
        assert "not of type 'integer'" in await opened.call("sums__add", a="2", b=3)
        assert "'b' is a required property" in await opened.call("sums__add", a=2)
        assert (await opened.call("shout", text=["a"])).startswith("!$.text: ")


async def test_a_server_over_http_is_used_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with await anyio.open_process([*PROGRAM, str(port)], stderr=None) as process:
        try:
            with anyio.fail_after(20):
                while not await _listens(port):
                    await anyio.sleep(0.05)
            settings = {"servers": {"web": {"url": f"http://127.0.0.1:{port}/mcp"}}}
            async with run(tmp_path, {"web": ["add"]}, settings=settings) as opened:
                assert await opened.call("web__add", a=1, b=1) == "2"
        finally:
            process.kill()


async def _listens(port: int) -> bool:
    try:
        await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
    except OSError:
        return False
    return True


async def test_what_goes_wrong_is_an_error_of_that_call_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("flood", "slow", "garbage", "failing", "fail", "shout")
    async with run(tmp_path, {"host": names, "sums": ["add", "long", "babble"]}) as opened:
        async with opened.client() as client:
            for name in ("flood", "garbage", "failing"):
                assert f"!{name} failed" in await said(client, name)
            assert "did not answer within 0.2 s" in await said(client, "slow")
            assert "of no concern" not in await said(client, "fail")
            for size in (bridges.MOST_REPLY, 3 * bridges.MOST_REPLY):
                assert (await said(client, "sums__long", size=size)).startswith("!")
            assert await said(client, "sums__babble") == "said"
            assert await said(client, "sums__add", a=1, b=1) == "2"
            assert await said(client, "shout", text="a") == "A"
    assert "writes more than" in caplog.text


async def test_a_server_that_dies_fails_its_calls_and_nothing_else(tmp_path: Path) -> None:
    async with run(tmp_path, {"sums": ["die", "add"], "host": ["shout"]}) as opened:
        async with opened.client() as client:
            with anyio.fail_after(20):
                assert "failed" in await said(client, "sums__die")
                assert "failed" in await said(client, "sums__add", a=1, b=1)
            assert await said(client, "shout", text="a") == "A"


async def test_servers_and_programs_end_with_the_run(tmp_path: Path) -> None:
    leaving = ["sh", "-c", 'sleep 43219 & exec "$0" "$@"', *PROGRAM]
    settings = {
        "servers": {"sums": {"command": leaving}},
        "processes": {"slow": {"command": ["sleep", "43219"]}},
    }
    async with run(
        tmp_path, {"sums": ["pid", "hang"], "host": ["slow"]}, settings=settings
    ) as opened:
        async with opened.client() as client, anyio.create_task_group() as tasks:
            server = Path("/proc", await said(client, "sums__pid"))
            assert server.exists()
            tasks.start_soon(said, client, "slow")
            tasks.start_soon(said, client, "sums__hang")
            with anyio.fail_after(20):
                while len(_running(b"43219")) < 2:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert not server.exists()
    with anyio.fail_after(5):
        while _running(b"43219"):
            await anyio.sleep(0.01)


def _running(word: bytes) -> list[Path]:
    """The processes with that word in their command line."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [each.parent] if word in each.read_bytes().split(b"\0") else []
    return found


async def test_a_call_too_many_waits_and_more_than_that_are_refused(
    tmp_path: Path,
) -> None:
    at_once = most = 0
    answers: list[str] = []
    refused = anyio.Event()

    async def busy() -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await refused.wait()
        at_once -= 1
        return "done"

    async with run(tmp_path, {}, [busy]) as opened, opened.client() as client:
        began_s = anyio.current_time()

        async def ask() -> None:
            answers.append(await said(client, "busy"))
            if len(answers) == 24:
                refused.set()

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(ask)
        took_s = anyio.current_time() - began_s
    assert most == 4
    assert answers.count("done") == 36
    assert sum("are waiting already" in each for each in answers) == 24
    # 20 a second.
    assert took_s >= 1


async def test_a_request_that_is_too_long_is_refused_by_its_id(tmp_path: Path) -> None:
    async with run(tmp_path, {}, [shout]) as opened, opened.client() as client:
        with pytest.raises(MCPError, match="a message may have 1,048,576 bytes"):
            await client.call_tool("shout", {"text": "x" * (2 << 20)})
        assert await said(client, "shout", text="a") == "A"


async def test_a_request_of_too_many_values_is_refused_by_its_id(tmp_path: Path) -> None:
    async with run(tmp_path, {}, [shout]) as opened, opened.client() as client:
        with pytest.raises(MCPError, match="send less at a time"):
            await client.call_tool("shout", {"text": [0] * 100_000})
        assert await said(client, "shout", text="a") == "A"


async def test_a_log_line_tells_the_tool_and_not_what_was_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    async with run(tmp_path, {"host": ["shout"]}) as opened:
        await opened.call("shout", text="private words")
    (line,) = [each for each in caplog.records if each.message == "host tool"]
    assert vars(line)["tool"] == "shout"
    assert "PRIVATE" not in str(vars(line)).upper()
