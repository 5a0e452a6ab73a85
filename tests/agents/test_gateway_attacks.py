"""Whatever bytes come from inside are answered or cut; none of them reaches the service."""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
from anyio.abc import SocketStream
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.service import MESSAGE, Inside, a_run, a_service, chunk, saying
from tests.streams import everything

BODY = json.dumps(MESSAGE).encode()
SIZE = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/messages\r\n\r\n",
        b"POST /v1/messages HTTP/9.9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost : a\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /" + b"a" * 40_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 7_000,
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_is_no_request_of_the_run_is_refused_and_closed(
    tmp_path: Path, data: bytes
) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        said = await run.say(data)
        assert said.startswith((b"HTTP/1.1 40", b"HTTP/1.1 501"))
        assert not service.heard
        await lives(run)


async def lives(run: Inside) -> None:
    run.service.answer = saying(b"{}")
    assert (await run.post()).status_code == 200


@pytest.mark.parametrize(
    ("first", "more", "body"),
    [
        ("POST http://a.example/v1/messages", [SIZE], BODY),
        ("GET http://127.0.0.1/v1/models", [], b""),
        ("GET //127.0.0.1/v1/models", [], b""),
        ("CONNECT api.example.com:443", [], b""),
        ("CONNECT /v1/models", [], b""),
        ("GET /v1/models/../files", [], b""),
        ("GET /v1/models%2f..%2ffiles", [], b""),
        ("POST /v1/messages", [SIZE, "Transfer-Encoding: chunked"], b"0\r\n\r\n" + BODY),
        ("POST /v1/messages", ["Transfer-Encoding: chunked", SIZE], b"0\r\n\r\n" + BODY),
        ("POST /v1/messages", [SIZE, "Transfer-Encoding: chunked"], chunk(BODY) + chunk(b"")),
        ("POST /v1/messages", ["Transfer-Encoding: identity", SIZE], BODY),
        ("POST /v1/messages", ["Transfer-Encoding: chunked"], b"zz\r\n"),
        ("POST /v1/messages", ["Content-Length: 1000000000"], b"x" * 100_000),
        ("POST /v1/messages", ["Content-Length: 99999999999999999999"], b"x"),
    ],
)
async def test_the_token_opens_nothing_more(
    tmp_path: Path, first: str, more: list[str], body: bytes
) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        said = await run.say(run.head(first, *more) + body)
        assert said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
        assert not service.heard
        await lives(run)


async def test_headers_that_are_no_ascii_stay_behind(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        last = "Connection: close"
        said = await run.say(run.head("POST /v1/messages", SIZE, "User-Agent: é", last) + BODY)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert "user-agent" not in service.heard[0].headers


async def test_a_body_without_end_is_refused_while_it_comes(tmp_path: Path) -> None:
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    async with a_service() as service, a_run(tmp_path, service) as run:
        sent = 0

        async def send(stream: SocketStream) -> None:
            nonlocal sent
            await stream.send(run.head("POST /v1/messages", "Transfer-Encoding: chunked"))
            with suppress(anyio.BrokenResourceError):
                while sent < 1 << 30:
                    await stream.send(piece)
                    sent += 65536

        with anyio.fail_after(20):
            async with await run.connect() as stream, anyio.create_task_group() as tasks:
                tasks.start_soon(send, stream)
                assert (await everything(stream)).startswith(b"HTTP/1.1 413 ")
                tasks.cancel_scope.cancel()
        assert sent < 100 << 20
        assert not service.heard
        await lives(run)


async def test_the_refusal_of_a_large_body_arrives(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        answer = await run.client.post("/v1/messages", content=b" " * (33 << 20))
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"
        assert not service.heard


async def test_slow_clients_keep_nobody_waiting(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        streams = []
        for n in range(100):
            streams.append(await run.connect())
            await streams[-1].send(run.head("POST /v1/messages")[: 10 + n])
        await lives(run)
        for stream in streams:
            await stream.aclose()


async def test_one_that_sends_its_body_slowly_is_given_up(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service, silent_s=0.3) as run:
        async with await run.connect() as stream:
            await stream.send(run.head("POST /v1/messages", SIZE) + BODY[:5])
            with anyio.fail_after(5):
                assert (await everything(stream)).startswith(b"HTTP/1.1 408 ")
        async with await run.connect() as stream:
            await stream.send(run.head("POST /v1/messages")[:20])
            with anyio.fail_after(5):
                assert await everything(stream) == b""
        assert not service.heard


PIECES = [
    *(b"POST ", b"GET ", b"HEAD ", b"/v1/messages", b"/v1/models", b"/", b"?a=b#c", b"%00"),
    *(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"Host: x\r\n", b"\r\n", b"\n", b"\r", b" ", b"\t"),
    *(b"Content-Length: 14\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    *(b"user-agent: \xe9\r\n", b"x-api-key: \xe9\r\n", b"Host: [\r\n", b"Cookie: a\r\n"),
    *(b'{"model": "a"}', b'{"model": "a"', b"}", b"[[[", b"0\r\n\r\n", b"e\r\n", b"\xff\x00"),
]


@settings(max_examples=25, deadline=None)
@given(st.booleans(), st.lists(st.sampled_from(PIECES) | st.binary(max_size=9), max_size=20))
async def test_no_bytes_get_past_it(with_token: bool, pieces: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        async with a_service() as service, a_run(Path(folder), service) as run:
            head = run.head("POST /v1/messages")[:-2] if with_token else b""
            async with await run.connect() as stream:
                await stream.send(head + b"".join(pieces) or b" ")
                await stream.send_eof()
                with anyio.fail_after(5):
                    said = await everything(stream)
            assert said[:9] in (b"", b"HTTP/1.1 ")
            assert b" 500 " not in said
            for heard in service.heard:
                assert with_token
                assert (heard.line, heard.body) == ("POST /v1/messages HTTP/1.1", {"model": "a"})
                assert heard.headers.keys() <= GOING
            await lives(run)


GOING = {
    *("host", "accept", "user-agent", "x-api-key", "content-type", "content-length"),
    *("accept-encoding", "connection"),
}
