"""JSON of more values than anybody means, at each door: other chats are answered meanwhile."""

import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.control.daemon import Platform, platform, token
from tests.daemon.running import Client, in_chat
from tests.forked import Program
from tests.web.clients import JSON, http_client

pytestmark = [pytest.mark.anyio, pytest.mark.bubblewrap]
MANY = 1_500_000
# What a server may work on such a message, of which three quarters of a second is its parsing.
_MOST_CPU_S, _MOST_MEMORY_KIB = 1.5, 300_000
_ZEROS = b"[0" + b",0" * MANY + b"]"
HOSTILE = {
    "zeros": _ZEROS,
    "short texts": b'[""' + b',""' * (MANY // 2) + b"]",
    "lists of lists": b"[[]" + b",[]" * (MANY // 2) + b"]",
    "nested": b"[" * MANY + b"0" + b"]" * MANY,
    "names": b'{"":0' + b',"":0' * (MANY // 3) + b"}",
    "a number of many digits": b"[" + b"9" * (3 << 20) + b"]",
    "escapes": b'["' + b'\\\\\\"' * MANY + b'",0' + b",0" * MANY + b"]",
    "a text without end": _ZEROS[:-1] + b',"' + b"x" * 100,
    "blanks": b"[" + b" " * (3 << 20) + b"]",
}


@pytest.fixture(scope="module")
async def here(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Platform]:
    async with platform(tmp_path_factory.mktemp("many"), "bubblewrap", limit_s=600) as found:
        async with in_chat(found.place, "warm-up") as client:
            await client.exec("true")
        yield found


class Cost:
    """What a server works and holds beyond what it held, while the block lasts."""

    def __init__(self, program: Program) -> None:
        self._program, self._at = program, Path("/proc", str(program.pid))

    def __enter__(self) -> None:
        self._at.joinpath("clear_refs").write_text("5")
        self._before_s, self._before_kib = self._program.cpu_s(), self._held_kib("VmRSS")

    def __exit__(self, *failed: object) -> None:
        if failed == (None, None, None):
            assert self._program.cpu_s() - self._before_s < _MOST_CPU_S
            assert self._held_kib("VmHWM") - self._before_kib < _MOST_MEMORY_KIB

    def _held_kib(self, name: str) -> int:
        lines = self._at.joinpath("status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def call(arguments: bytes) -> bytes:
    head = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"exec","arguments":'
    return head + arguments + b"}}"


ARGUMENTS = {
    "command": b'{"command":' + _ZEROS + b"}",
    "unknown": b"{" + b",".join(b'"a%d":0' % n for n in range(200_000)) + b"}",
    "env": b'{"command":"true","env":{'
    + b",".join(b'"a%d":[]' % n for n in range(200_000))
    + b"}}",
    "batch": b"{}}}," + b",".join(b"{}" for _ in range(MANY // 3)),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("door", ["agent/invoke", "sandbox/{id}/exec"])
async def test_other_chats_are_answered_while_the_api_refuses_it(
    here: Platform, door: str, kind: str
) -> None:
    session = (await here.prepare("api"))["id"]
    await here.made(session)
    member = b"messages" if "invoke" in door else b"command"
    about = b'"sandbox_session_id":"%s",' % session.encode() if "invoke" in door else b""
    body = b'{%s"%s":%s}' % (about, member, HOSTILE[kind])
    async with in_chat(here.place, "another") as another:
        await another.exec("true")
        with Cost(here.daemon.process):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(_is_refused, here, door.format(id=session), body))
                assert await another.exec("echo here") == "here\n"


async def _is_refused(here: Platform, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await here.ask("POST", path, content=body, headers=headers)
    assert answer.status_code == 413, answer.text[:300]
    assert "send less at a time" in answer.json()["detail"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("kind", ARGUMENTS)
async def test_other_chats_are_answered_while_mcp_over_http_refuses_it(
    here: Platform, kind: str
) -> None:
    secret = await token(here.place, "eve", "mcp")
    headers = {**JSON, "authorization": f"Bearer {secret}", "mcp-sandbox-chat": "hostile"}
    async with in_chat(here.place, "another") as another, http_client(timeout=30) as http:
        await another.exec("true")
        with Cost(here.daemon.process):
            answer = await http.post(
                f"{here.url}/mcp", headers=headers, content=call(ARGUMENTS[kind])
            )
            assert answer.status_code == 413
            assert "send less at a time" in answer.text
            assert await another.exec("echo here") == "here\n"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le"])
@pytest.mark.parametrize("door", ["api", "mcp"])
async def test_values_are_not_hidden_in_another_encoding(
    here: Platform, door: str, encoding: str
) -> None:
    # Read as ASCII, the quote in the text ends it, and all that follows is in the next.
    values = b'["\\""' + b",0" * MANY + b"]"
    body = b'{"messages":%s}' % values if door == "api" else call(b'{"command":%s}' % values)
    content = body.decode().encode(encoding)
    async with in_chat(here.place, "another") as another, http_client(timeout=30) as http:
        await another.exec("true")
        secret = await token(here.place, "eve", "mcp")
        headers = {**JSON, "authorization": f"Bearer {secret}", "mcp-sandbox-chat": "hostile"}
        with Cost(here.daemon.process):
            if door == "api":
                await _is_refused(here, "agent/invoke", content)
            else:
                answer = await http.post(f"{here.url}/mcp", headers=headers, content=content)
                assert answer.status_code == 413
            assert await another.exec("echo here") == "here\n"


@pytest.mark.parametrize("kind", ARGUMENTS)
async def test_other_chats_are_answered_while_the_socket_refuses_it(
    here: Platform, kind: str
) -> None:
    async with in_chat(here.place, "hostile") as hostile, in_chat(here.place, "other") as another:
        await another.exec("true")
        with Cost(here.daemon.process):
            await hostile.stream.send(call(ARGUMENTS[kind]) + b"\n")
            error = (await hostile.answer(7))["error"]
            assert "send less at a time" in error["message"]
            assert await another.exec("echo here") == "here\n"
        # Its client goes on.
        assert await hostile.exec("echo here") == "here\n"


async def test_json_in_a_text_is_measured_too(here: Platform) -> None:
    async with in_chat(here.place, "in-a-text") as client:
        await client.exec("true")
        with Cost(here.daemon.process):
            env = ARGUMENTS["env"].decode().partition('"env":')[2][:-1]
            result = await client.call("exec", command="true", env=env)
            assert result["isError"]
            assert "send less at a time" in result["content"][0]["text"]


@pytest.mark.parametrize("text", ['"' * (4 << 20), "\\" * (4 << 20), "[0,\n" * (1 << 20)])
async def test_any_text_of_a_file_passes(here: Platform, text: str) -> None:
    async with in_chat(here.place, "files") as client:
        result = await client.call("write_file", path="source", content=text)
        assert not result.get("isError"), result
        await _count(client, len(text))
    secret = await token(here.place, "bob", "mcp")
    headers = {**JSON, "authorization": f"Bearer {secret}", "mcp-sandbox-chat": "files"}
    given: dict[str, Any] = {"name": "exec", "arguments": {"command": "wc -c", "stdin": text}}
    sent = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": given}
    async with http_client(timeout=30) as http:
        answer = await http.post(f"{here.url}/mcp", headers=headers, content=json.dumps(sent))
        assert answer.status_code != 413


async def _count(client: Client, size: int) -> None:
    assert str(size) in await client.exec("wc -c < source")


async def test_what_is_below_the_limit_is_answered_by_few_words(here: Platform) -> None:
    session = (await here.prepare("few"))["id"]
    await here.made(session)
    body = {"messages": [0] * 19_000, "sandbox_session_id": session}
    with Cost(here.daemon.process):
        answer = await here.ask("POST", "agent/invoke", json=body)
        assert answer.status_code == 400
        assert len(answer.content) < 2000
        env: Any = {str(number): [] for number in range(9_000)}
        answer = await here.ask(
            "POST", f"sandbox/{session}/exec", json={"command": "x", "env": env}
        )
        assert answer.status_code == 400
    async with in_chat(here.place, "few") as client:
        for given in ({"env": env}, env):
            with Cost(here.daemon.process):
                result = await client.call("exec", **{"command": "true", **given})
            assert len(result["content"][0]["text"].splitlines()) <= 10


async def test_a_form_is_not_measured_as_json(here: Platform) -> None:
    session = (await here.prepare("form"))["id"]
    await here.made(session)
    files = {"files": ("table.csv", b'0,"",' * 400_000)}
    sent = await here.ask("POST", f"sandbox/{session}/upload", files=files)
    assert sent.status_code == 200, sent.text
