"""The line transport over a unix socket in this process."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.models import ExecResult
from mcp_sandbox.server.server import SandboxServer
from mcp_sandbox.server.transports import serve_lines
from tests.server.scripted import ScriptedSession, answering, server_of
from tests.server.test_stdio import INITIALIZE


class SocketClient:
    """Sends and receives JSON lines over a socket."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._lines = BufferedByteReceiveStream(stream)

    async def send(self, **message: Any) -> None:
        await self.stream.send(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def receive(self) -> Any:
        return json.loads(await self._lines.receive_until(b"\n", 1_000_000))


@asynccontextmanager
async def served(server: SandboxServer, tmp_path: Path) -> AsyncGenerator[SocketClient]:
    ended = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await serve_lines(server.core, stream, stream)
        ended.set()

    with anyio.fail_after(10):
        async with (
            await anyio.create_unix_listener(tmp_path / "socket") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, serve)
            async with await anyio.connect_unix(tmp_path / "socket") as stream:
                client = SocketClient(stream)
                await client.send(id=0, method="initialize", params=INITIALIZE)
                await client.receive()
                await client.send(method="notifications/initialized")
                yield client
            await ended.wait()
            tasks.cancel_scope.cancel()


async def test_a_call_is_answered_and_the_connection_ends_with_its_client(tmp_path: Path) -> None:
    session = answering(ExecResult("42\n", "", 0, 1))
    async with served(server_of(session), tmp_path) as client:
        params = {"name": "run_code", "arguments": {"code": "print(42)"}}
        await client.send(id="a", method="tools/call", params=params)
        answer = await client.receive()
        assert (answer["id"], answer["result"]["content"][0]["text"]) == ("a", "42\n")


async def test_a_client_that_hangs_up_cancels_its_calls(tmp_path: Path) -> None:
    begun, cancelled = anyio.Event(), anyio.Event()

    async def answer(*_: Any, **__: Any) -> Any:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with served(server_of(ScriptedSession(answer)), tmp_path) as client:
        params = {"name": "exec", "arguments": {"command": "x"}}
        await client.send(id=1, method="tools/call", params=params)
        await begun.wait()
    assert cancelled.is_set()


async def test_a_cancelled_request_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def answer(*_: Any, **__: Any) -> Any:
        begun.set()
        await anyio.sleep_forever()

    async with served(server_of(ScriptedSession(answer)), tmp_path) as client:
        params = {"name": "exec", "arguments": {"command": "x"}}
        await client.send(id=1, method="tools/call", params=params)
        await begun.wait()
        await client.send(method="notifications/cancelled", params={"requestId": ["not an id"]})
        await client.send(method="notifications/cancelled", params={"requestId": 1})


class Slow(ScriptedSession):
    """Answers the command "x" with `left` when it is left, or `ended` is set; others at once."""

    def __init__(self, left: ExecResult) -> None:
        super().__init__(self._answer_slowly)
        self.begun, self.ended, self.cancelled = anyio.Event(), anyio.Event(), anyio.Event()
        self._left = left

    async def _answer_slowly(self, command: str, *, leave: anyio.CancelScope, **_: Any) -> Any:
        if command != "x":
            return ExecResult(f"{command}\n", "", 0, 1)
        self.begun.set()
        try:
            with leave:
                await self.ended.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        return self._left

    def tell_news(self, text: str) -> None:
        super().tell_news(text)
        self.ended.set()


async def begin(client: SocketClient, session: Slow) -> None:
    """Make the call 1, which is slow."""
    params = {"name": "exec", "arguments": {"command": "x"}}
    await client.send(id=1, method="tools/call", params=params)
    await session.begun.wait()


async def give_up(client: SocketClient, request_id: Any, reason: Any) -> None:
    params = {"requestId": request_id, "reason": reason}
    await client.send(method="notifications/cancelled", params=params)


async def next_answer(client: SocketClient) -> tuple[Any, str]:
    """That to the call 2, which is quick, with all that was said before it."""
    params = {"name": "exec", "arguments": {"command": "y"}}
    await client.send(id=2, method="tools/call", params=params)
    answer = await client.receive()
    return answer["id"], "\n".join(block["text"] for block in answer["result"]["content"])


GOES_ON = ExecResult("begun\n", "", None, 1, process="p1-abc", running=True)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (GOES_ON, "begun\n\n[goes on as p1-abc after 0 s; process action=wait id=p1-abc waits for"),
        (ExecResult("", "", 3, 1), "[exit code 3]"),
    ],
    ids=["goes on", "had just ended"],
)
@pytest.mark.parametrize("reason", ["SdkError: Request timed out", "Timed out after 4s"])
@pytest.mark.parametrize("times", [1, 2])
async def test_what_a_client_gave_up_by_its_time_limit_is_told_with_the_next_answer(
    tmp_path: Path, reason: str, times: int, left: ExecResult, said: str
) -> None:
    session = Slow(left)
    async with served(server_of(session), tmp_path) as client:
        await begin(client, session)
        session.news = ["told before"]
        for _ in range(times):
            await give_up(client, 1, reason)
        await session.ended.wait()
        number, told = await next_answer(client)
    assert number == 2
    assert told.startswith("y\n\n[told before]\n[exec, for which your client did not wait: ")
    assert said in told
    assert not session.cancelled.is_set()


@pytest.mark.parametrize("reason", ["AbortError: This operation was aborted", None, 7, {"a": []}])
async def test_what_a_person_interrupts_is_cancelled(tmp_path: Path, reason: Any) -> None:
    session = Slow(GOES_ON)
    async with served(server_of(session), tmp_path) as client:
        await begin(client, session)
        await give_up(client, 1, reason)
        await session.cancelled.wait()
        # Whom nobody hears of any more is not given up either.
        await give_up(client, 1, "Request timed out")
    assert session.news == []


@pytest.mark.parametrize("request_id", [["not an id"], {"a": 1}, None, True, 1.5, 99, "x", ""])
async def test_giving_up_what_is_no_call_changes_nothing(tmp_path: Path, request_id: Any) -> None:
    session = Slow(ExecResult("x\n", "", 0, 1))
    async with served(server_of(session), tmp_path) as client:
        await begin(client, session)
        await give_up(client, request_id, "Request timed out")
        assert await next_answer(client) == (2, "y\n")
        session.ended.set()
        answer = await client.receive()
        assert (answer["id"], answer["result"]["content"][0]["text"]) == (1, "x\n")


async def test_an_answer_that_json_cannot_carry_becomes_an_error(tmp_path: Path) -> None:
    server = SandboxServer("x")

    @server.tool()
    async def broken() -> str:
        return "\udc80"

    async with served(server, tmp_path) as client:
        await client.send(id=5, method="tools/call", params={"name": "broken", "arguments": {}})
        answer = await client.receive()
        assert (answer["id"], answer["error"]["code"]) == (5, -32603)
        await client.send(id=6, method="tools/list", params={})
        assert len((await client.receive())["result"]["tools"]) == 1


async def test_a_refused_line_does_not_end_the_connection(tmp_path: Path) -> None:
    async with served(server_of(answering(None)), tmp_path) as client:
        await client.stream.send(b"nonsense\n")
        assert (await client.receive())["error"]["code"] == -32700
        await client.send(id=1, method="ping", params={})
        assert (await client.receive())["id"] == 1
