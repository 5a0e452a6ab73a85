"""The stdio transport, from outside: a real process and a client that speaks raw JSON lines."""

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tests import forked

ROOT = Path(__file__).parents[2]
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "1"},
}


class RawClient:
    """Sends lines, reads lines."""

    def __init__(self, process: Process | forked.Program) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.process = process
        self.stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)
        self._stderr = BufferedByteReceiveStream(process.stderr)
        self._last_id = 0

    async def send(self, line: bytes) -> None:
        await self.stdin.send(line + b"\n")

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        await self.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode())

    async def request(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        await self.send(json.dumps(message).encode())
        return self._last_id

    async def receive(self) -> Any:
        line = await self._stdout.receive_until(b"\n", 10_000_000)
        return json.loads(line)

    async def answer(self, request_id: int) -> Any:
        while True:
            message = await self.receive()
            if message.get("id") == request_id:
                return message

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        params = {"name": tool, "arguments": arguments}
        return (await self.answer(await self.request("tools/call", params)))["result"]

    async def start_endless_call(self) -> int:
        arguments = {"command": "forever"}
        number = await self.request("tools/call", {"name": "exec", "arguments": arguments})
        await self.noted("call started")
        return number

    async def noted(self, text: str) -> None:
        """Wait until the server has written a line to stderr."""
        while text.encode() not in await self._stderr.receive_until(b"\n", 1_000_000):
            pass

    async def rest_of_stdout(self) -> bytes:
        rest = bytearray()
        try:
            while True:
                rest += await self._stdout.receive()
        except anyio.EndOfStream:
            return bytes(rest)


@asynccontextmanager
async def started() -> AsyncGenerator[RawClient]:
    with anyio.fail_after(40):
        async with forked.start(
            [], env=os.environ, cwd=str(ROOT), stdin=None, module="tests.server.program"
        ) as process:
            try:
                yield RawClient(process)
            finally:
                if process.returncode is None:
                    process.kill()


@asynccontextmanager
async def connected() -> AsyncGenerator[RawClient]:
    async with started() as client:
        await client.answer(await client.request("initialize", INITIALIZE))
        await client.notify("notifications/initialized", {})
        yield client


async def test_only_json_rpc_reaches_stdout() -> None:
    async with connected() as client:
        result = await client.call("exec", {"command": "hello"})
        assert result["content"][0]["text"] == "hello"
        await client.noted("stray output of the server")


async def test_cancelling_a_call_ends_it_and_the_server_goes_on() -> None:
    async with connected() as client:
        number = await client.start_endless_call()
        await client.notify("notifications/cancelled", {"requestId": number})
        await client.noted("call cancelled")
        assert (await client.call("exec", {"command": "next"}))["content"][0]["text"] == "next"


async def test_closing_stdin_kills_running_calls_and_ends_the_server() -> None:
    async with connected() as client:
        await client.start_endless_call()
        await client.stdin.aclose()
        await client.noted("call cancelled")
        await client.noted("left cleanly")
        assert await client.process.wait() == 0


async def test_a_client_that_closes_at_once_gets_its_answers() -> None:
    async with started() as client:
        number = await client.request("initialize", INITIALIZE)
        await client.notify("notifications/initialized", {})
        listed = await client.request("tools/list", {})
        await client.stdin.aclose()
        assert (await client.answer(number))["result"]["serverInfo"]["name"] == "mcp-sandbox"
        assert len((await client.answer(listed))["result"]["tools"]) == 14
        assert await client.process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_kills_running_calls_and_ends_the_server(number: signal.Signals) -> None:
    async with connected() as client:
        await client.start_endless_call()
        client.process.send_signal(number)
        await client.noted("call cancelled")
        await client.noted("left cleanly")
        assert await client.process.wait() == 0
        for line in (await client.rest_of_stdout()).splitlines():
            json.loads(line)


async def test_a_signal_ends_an_idle_server_that_waits_for_input() -> None:
    async with connected() as client:
        client.process.send_signal(signal.SIGINT)
        await client.noted("left cleanly")
        assert await client.process.wait() == 0


async def test_a_server_whose_client_died_ends() -> None:
    async with connected() as client:
        await client.request("tools/list", {})
        assert client.process.stdout
        await client.process.stdout.aclose()
        await client.stdin.aclose()
        assert await client.process.wait() == 0


async def test_a_client_that_does_not_read_cannot_keep_the_server_from_ending() -> None:
    async with connected() as client:
        await client.start_endless_call()
        for _ in range(40):
            await client.request("tools/list", {})
        await client.stdin.aclose()
        await client.noted("left cleanly")
        assert await client.process.wait() == 0


NO_MESSAGES = [
    (b'{"jsonrpc":"2.0","id":77,"method":"tools/call","params":' + b"[" * 100_000, 77, -32600),
    (b'{"params":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b',"id":"x"}', "x", -32700),
    (b"[" * 1_000_000, None, -32600),
    (b"not json", None, -32700),
    (b'{"jsonrpc":"2.0","id":78,"method":"ping","params":"\xff\xfe"}', 78, -32700),
    (b'{"jsonrpc":"2.0","id":79,"method":"ping","params":{"a":"\\ud800"}}', 79, -32700),
    (b'{"jsonrpc":"1.0","id":80,"method":"ping"}', 80, -32600),
    (b'{"jsonrpc":"2.0","id":81,"method":5}', 81, -32600),
    (b'[{"jsonrpc":"2.0","id":82,"method":"ping"}]', None, -32600),
    (
        b'{"id":83,"jsonrpc":"2.0","method":"x","params":"' + b"x" * (33 << 20) + b'"}',
        83,
        -32600,
    ),
    (b"9" * 100_000, None, -32700),
]


async def test_what_is_not_a_message_is_refused_and_the_server_goes_on() -> None:
    async with connected() as client:
        for line, number, code in NO_MESSAGES:
            await client.send(line)
            refused = await client.receive()
            assert (refused["id"], refused["error"]["code"]) == (number, code), line[:80]
            assert len(json.dumps(refused)) < 500
            answer = await client.call("exec", {"command": "ok"})
            assert answer["content"][0]["text"] == "ok"


async def test_arguments_that_json_does_not_know_are_refused_readably() -> None:
    async with connected() as client:
        for number, said in [
            ("NaN", "not NaN"),
            ("Infinity", "not Infinity"),
            ("1e999", "not Inf"),
        ]:
            await client.send(
                b'{"jsonrpc":"2.0","id":"n","method":"tools/call","params":{"name":"run_code",'
                b'"arguments":{"code":"1","timeout_s":' + number.encode() + b"}}}"
            )
            result = (await client.receive())["result"]
            assert result["isError"]
            text = result["content"][0]["text"]
            assert "timeout_s must be a number from 1 to 86,400" in text
            assert said in text


async def test_nested_arguments_below_the_parsers_limit_are_refused_readably() -> None:
    nested: Any = 1
    for _ in range(120):
        nested = {"a": nested}
    async with connected() as client:
        result = await client.call("exec", {"command": "x", "env": nested})
        assert result["isError"]
        assert "env: the value of 'a' must be text" in result["content"][0]["text"]


async def test_ten_megabytes_of_code_are_refused_readably() -> None:
    async with connected() as client:
        result = await client.call("run_code", {"code": "x" * 10_000_000})
        assert result["isError"]
        assert "not 10,000,000 characters" in result["content"][0]["text"]


async def test_arguments_of_too_many_values_are_refused_by_their_id() -> None:
    zeros = b"[0" + b",0" * 1_000_000 + b"]"
    params = b'{"name":"exec","arguments":{"command":' + zeros + b"}}"
    async with connected() as client:
        assert isinstance(client.process, forked.Program)
        began_s = client.process.cpu_s()
        await client.send(b'{"jsonrpc":"2.0","id":"n","method":"tools/call","params":%s}' % params)
        refused = await client.receive()
        assert (refused["id"], refused["error"]["code"]) == ("n", -32600)
        assert "send less at a time" in refused["error"]["message"]
        assert client.process.cpu_s() - began_s < 1
        assert (await client.call("exec", {"command": "ok"}))["content"][0]["text"] == "ok"


async def test_eight_megabytes_of_content_arrive() -> None:
    async with connected() as client:
        result = await client.call("exec", {"command": "x", "stdin": "\n" * (8 << 20)})
        assert result["content"][0]["text"] == "x"


async def test_messages_of_a_file_are_answered(tmp_path: Path) -> None:
    lines = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    ]
    requests, answers = tmp_path / "in", tmp_path / "out"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with requests.open("rb") as stdin, answers.open("wb") as stdout, anyio.fail_after(40):
        async with await anyio.open_process(
            [sys.executable, "-m", "tests.server.program"],
            cwd=ROOT,
            stdin=stdin,
            stdout=stdout,
            stderr=None,
        ) as process:
            assert await process.wait() == 0
    ids = [json.loads(line)["id"] for line in answers.read_text().splitlines()]
    assert ids == [1, 2]


async def test_children_of_the_server_inherit_neither_side_of_the_wire() -> None:
    async with connected() as client:
        wire = {os.readlink(f"/proc/{client.process.pid}/fd/{n}") for n in (0, 1)}
        assert "/dev/null" in wire
        assert os.readlink(f"/proc/{client.process.pid}/fd/1") == os.readlink(
            f"/proc/{client.process.pid}/fd/2"
        )
