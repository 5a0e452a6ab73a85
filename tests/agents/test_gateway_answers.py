"""Answers of a model service pass as they come, counted and bounded, and never with the key."""

import contextlib
import gzip
import json
import logging
import os
import signal
from functools import partial
from pathlib import Path

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream

from mcp_sandbox.agents.connectors import find_connector
from mcp_sandbox.agents.gateway import open_gateway
from mcp_sandbox.config import ConnectorConfig, RunConfig
from mcp_sandbox.egress.settings import load_trusted
from mcp_sandbox.egress.ways_out import open_ways_out
from mcp_sandbox.errors import OperatorError
from tests.agents.service import (
    CHAT,
    KEY,
    MESSAGE,
    OPENAI,
    STREAM_HEAD,
    Service,
    a_run,
    a_service,
    chunk,
    hanging,
    saying,
    told,
)
from tests.e2e.messages_api import Fault, Script, serving
from tests.egress.test_ways_out import another, process_of

USAGE = {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}


async def test_tokens_of_a_whole_answer_are_counted(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        usage = {**USAGE, "output_tokens": 7, "cache_creation": {"ephemeral_5m_input_tokens": 2}}
        content = [{"type": "text", "text": '"output_tokens": 999'}]
        service.answer = saying(json.dumps({"content": content, "usage": usage}).encode())
        for _ in range(2):
            await run.post()
        counts = run.gateway.counts
        assert (counts.requests, counts.input_tokens, counts.output_tokens) == (2, 34, 14)
        assert counts.cached_tokens == 10
        assert counts.sent == sum(len(heard.raw) for heard in service.heard)
        assert counts.received > 200


def conversation() -> list[bytes]:
    words = [
        told(type="content_block_delta", delta={"text": f"word {n} " + '"usage"' * n})
        for n in range(3)
    ]
    begun = {"usage": {**USAGE, "output_tokens": 1}}
    return [
        told(type="message_start", message=begun),
        *words,
        told(type="message_delta", usage={"output_tokens": 42}),
        told(type="message_stop"),
    ]


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_tokens_of_a_stream_are_counted_however_it_is_cut_into_pieces(
    tmp_path: Path, size: int
) -> None:
    whole = b"".join(conversation())

    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD)
        for at in range(0, len(whole), size):
            await stream.send(chunk(whole[at : at + size]))
        await stream.send(chunk(b""))

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        got = await run.post()
        assert got.content == whole
        assert got.headers["content-type"] == "text/event-stream"
        assert (run.gateway.counts.input_tokens, run.gateway.counts.output_tokens) == (17, 42)


async def test_events_come_as_they_are_sent(tmp_path: Path) -> None:
    goes_on = anyio.Event()

    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD + chunk(told(type="message_start")))
        await goes_on.wait()
        await stream.send(chunk(told(type="message_stop")) + chunk(b""))

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        async with run.client.stream("POST", "/v1/messages", json=MESSAGE) as got:
            lines = got.aiter_lines()
            with anyio.fail_after(5):
                assert await anext(lines) == "event: message_start"
            goes_on.set()
            assert "event: message_stop" in [line async for line in lines]


async def test_a_stream_of_completions_is_asked_for_what_it_costs(tmp_path: Path) -> None:
    end = {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}
    stream = b'data: {"choices": []}\n\ndata: ' + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n"
    async with a_service() as service, a_run(tmp_path, service, **OPENAI) as run:
        service.answer = saying(stream, content_type="text/event-stream")
        asked = {**MESSAGE, "stream": True, "stream_options": {"include_usage": False}}
        await run.post(asked, "/v1/chat/completions")
        assert service.heard[0].body["stream_options"] == {"include_usage": True}
        assert (run.gateway.counts.input_tokens, run.gateway.counts.output_tokens) == (3, 4)


async def test_a_run_has_no_more_requests_than_it_may(tmp_path: Path) -> None:
    async with a_service() as service:
        async with a_run(tmp_path, service, limits=RunConfig(max_requests=3)) as run:
            answers = []

            async def ask() -> None:
                answers.append(await run.post())

            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(ask)
            assert sorted(each.status_code for each in answers) == [200] * 3 + [403] * 3
            said = (await run.post()).json()["error"]
            assert said["type"] == "permission_error"
            assert "agents.run.max_requests, 3" in said["message"]
        assert len(service.heard) == 3


async def test_a_run_has_no_further_request_once_its_tokens_are_used(tmp_path: Path) -> None:
    async with a_service() as service:
        async with a_run(tmp_path, service, limits=RunConfig(max_output_tokens=100)) as run:
            service.answer = saying(b'{"usage": {"input_tokens": 1000, "output_tokens": 60}}')
            statuses = [(await run.post()).status_code for _ in range(3)]
            assert statuses == [200, 200, 403]
        assert len(service.heard) == 2


async def test_a_stream_that_the_program_leaves_early_costs_its_events(tmp_path: Path) -> None:
    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD + b"".join(map(chunk, conversation()[:4])))
        await hanging(stream)

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        async with run.client.stream("POST", "/v1/messages", json=MESSAGE) as got:
            async for piece in got.aiter_bytes():
                if b"word 2" in piece:
                    break
        with anyio.fail_after(5):
            await service.gone.wait()
            while run.gateway.counts.output_tokens < 4:
                await anyio.sleep(0.01)
        assert run.gateway.counts.output_tokens == 4


async def test_what_was_used_counts_if_the_process_ends_in_the_middle_of_an_answer(
    tmp_path: Path,
) -> None:
    used = told(type="message_start", message={"usage": {**USAGE, "output_tokens": 60}})

    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD + chunk(used))
        await hanging(stream)

    limits = RunConfig(max_output_tokens=100)
    async with a_service() as service, a_run(tmp_path, service, limits=limits) as run:
        service.answer = answer
        for number in range(2):
            link = await run.ways_out.up()
            async with run.client.stream("POST", "/v1/messages", json=MESSAGE) as got:
                with contextlib.suppress(httpx2.RemoteProtocolError):
                    async for _ in got.aiter_bytes():
                        os.kill(await anyio.to_thread.run_sync(process_of), signal.SIGKILL)
            await another(run.ways_out, link)
            assert run.gateway.counts.output_tokens == 60 * (number + 1)
        assert (await run.post()).status_code == 403


async def test_what_comes_behind_an_answer_is_not_the_answer_to_the_next_request(
    tmp_path: Path,
) -> None:
    async def twice(stream: SocketStream) -> None:
        late = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate"
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfirst" + late)

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = twice
        assert (await run.post()).text == "first"
        service.answer = saying(b"second")
        assert (await run.post()).text == "second"


async def test_a_header_is_not_named_by_the_key(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = saying(b"{}", **{f"anthropic-{KEY}": "1", "anthropic_of": f"a {KEY}"})
        answer = await run.post()
        assert answer.headers["anthropic-of"] == "a " + "*" * len(KEY)
        assert KEY not in str(answer.headers)
        assert "*" * len(f"anthropic-{KEY}") in answer.headers


async def test_eight_requests_go_at_once_and_the_others_wait(tmp_path: Path) -> None:
    together, most, full = 0, 0, anyio.Event()
    goes_on = anyio.Event()

    async def answer(stream: SocketStream) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        if together == 8:
            full.set()
        await goes_on.wait()
        together -= 1
        await saying(b"{}")(stream)

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        answers = []

        async def ask() -> None:
            answers.append((await run.post()).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)
            with anyio.fail_after(5):
                await full.wait()
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        assert answers == [200] * 20
        assert most == 8


@pytest.mark.parametrize("status", ["401 No", "429 Slow", "500 Error", "529 Overloaded"])
async def test_the_services_refusal_is_passed_back(tmp_path: Path, status: str) -> None:
    body = b'{"type":"error","error":{"type":"some_error","message":"no"}}'
    more = {"retry_after": "7", "request_id": "req_1", "anthropic_ratelimit": "0"}
    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = saying(body, status, **more, set_cookie="a=b", server="x")
        answer = await run.post()
        assert (answer.status_code, answer.content) == (int(status[:3]), body)
        came = {name: answer.headers[name] for name in answer.headers if name != "date"}
        assert came.pop("transfer-encoding") == "chunked"
        assert came == {
            "content-type": "application/json",
            "retry-after": "7",
            "request-id": "req_1",
            "anthropic-ratelimit": "0",
        }


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Elsewhere", "308 Elsewhere"])
async def test_a_redirect_is_not_followed(tmp_path: Path, status: str) -> None:
    async with a_service() as service, a_service() as other, a_run(tmp_path, service) as run:
        service.answer = saying(b"", status, location=f"{other.url}/v1/messages")
        answer = await run.post()
        assert answer.status_code == int(status[:3])
        assert "location" not in answer.headers
        assert "correct connectors.one.url" in answer.json()["error"]["message"]
        assert not other.heard


async def test_a_service_that_is_not_there_is_told(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service, url="http://127.0.0.1:9") as run:
        answer = await run.post()
        assert answer.status_code == 502
        assert "connector one failed: it cannot be reached: Connection refused" in answer.text


async def test_a_silent_service_is_given_up(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service, silent_s=0.2) as run:
        service.answer = hanging
        answer = await run.post()
        assert answer.status_code == 504
        with anyio.fail_after(5):
            await service.gone.wait()


@pytest.mark.parametrize("length", [None, 5000])
@pytest.mark.parametrize("then", ["hang up", "say nothing"])
async def test_an_answer_that_breaks_off_has_no_end_inside_either(
    tmp_path: Path, length: int | None, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(stream: SocketStream) -> None:
        first = told(type="message_start")
        if length:
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + first)
        else:
            await stream.send(STREAM_HEAD + chunk(first))
        if then == "hang up":
            await stream.aclose()
        else:
            await hanging(stream)

    async with a_service() as service, a_run(tmp_path, service, silent_s=0.3) as run:
        service.answer = answer
        with anyio.fail_after(10), pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
            await run.post()
        service.answer = saying(b"{}")
        assert (await run.post()).status_code == 200
    assert "connector one failed" in caplog.text


async def test_an_answer_that_is_no_http_is_told(tmp_path: Path) -> None:
    async def answer(stream: SocketStream) -> None:
        await stream.send(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        assert (await run.post()).status_code == 502


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_takes_its_request_with_it(tmp_path: Path, begun: bool) -> None:
    async def answer(stream: SocketStream) -> None:
        if begun:
            await stream.send(STREAM_HEAD + chunk(told(type="message_start")))
        await hanging(stream)

    body = json.dumps(MESSAGE).encode()
    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = answer
        async with await run.connect() as stream:
            await stream.send(run.head("POST /v1/messages", f"Content-Length: {len(body)}") + body)
            with anyio.fail_after(5):
                await service.asked.wait()
                if begun:
                    await stream.receive()
        with anyio.fail_after(5):
            await service.gone.wait()


async def test_one_connection_carries_many_requests(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        body = json.dumps(MESSAGE).encode()
        head = run.head("POST /v1/messages", f"Content-Length: {len(body)}")
        last = run.head("GET /v1/models", "Connection: close")
        said = await run.say(head + body + head + body + last)
        assert said.count(b"HTTP/1.1 200 ") == 3
        assert len(service.heard) == 3


async def test_the_key_is_read_when_it_is_used(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        (tmp_path / "key").write_text("another-marked-key")
        await run.post()
        assert service.heard[0].headers["x-api-key"] == "another-marked-key"
        (tmp_path / "key").chmod(0o644)
        answer = await run.post()
        assert answer.status_code == 403
        assert str(tmp_path) not in answer.text
        assert len(service.heard) == 1


async def test_without_a_usable_key_no_run_begins(tmp_path: Path) -> None:
    given = {"url": "https://a.example"}
    connector = find_connector({"one": ConnectorConfig.model_validate(given)})
    async with open_ways_out(partial(load_trusted, None)) as ways_out:
        with pytest.raises(OperatorError, match="connector one has no key"):
            async with open_gateway(connector, chat=CHAT, limits=RunConfig(), ways_out=ways_out):
                pytest.fail("it began")


async def test_the_key_is_in_no_answer_log_error_or_repr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def parrot(stream: SocketStream) -> None:
        text = json.dumps({"error": f"the key {service.heard[-1].headers['x-api-key']} is wrong"})
        await stream.send(STREAM_HEAD.replace(b"200 OK", b"401 No"))
        for at in range(0, len(text), 5):
            await stream.send(chunk(text[at : at + 5].encode()))
        await stream.send(chunk(b""))

    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = parrot
        answer = await run.post()
        assert answer.status_code == 401
        assert answer.json() == {"error": f"the key {'*' * len(KEY)} is wrong"}
        service.answer = hanging
        with anyio.move_on_after(0.2):
            await run.post()
        service.answer = saying(b"x", "200 OK", content_encoding="gzip")
        with contextlib.suppress(httpx2.TransportError):
            await run.post()
        assert KEY not in repr(run.gateway) + repr(vars(run.gateway))
        assert all(heard.headers["x-api-key"] == KEY for heard in service.heard)
    assert KEY not in caplog.text
    assert any(record.message == "model" for record in caplog.records)


async def test_a_header_does_not_give_the_key_back(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = saying(b"{}", request_id=f"of {KEY}", anthropic_key=KEY)
        headers = (await run.post()).headers
        filler = "*" * len(KEY)
        assert (headers["request-id"], headers["anthropic-key"]) == (f"of {filler}", filler)


async def test_a_compressed_answer_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        service.answer = saying(gzip.compress(b"{}"), content_encoding="gzip")
        answer = await run.post()
        assert answer.status_code == 502
        assert "the service compresses its answer" in answer.text
        assert service.heard[0].headers["accept-encoding"] == "identity"


async def test_a_scripted_model_is_asked_through_it_whatever_befalls_it(tmp_path: Path) -> None:
    faults = [
        Fault(529, {"retry-after": "3"}),
        Fault(307, {"location": "/v1/models"}),
        Fault(cut=True),
    ]
    script = Script([("read", {"path": "a"})], "done", faults=faults)
    asked = {**MESSAGE, "tools": [{"name": "read", "input_schema": {}}], "stream": True}
    with serving(script) as url:
        async with a_run(tmp_path, Service(url)) as run:
            busy = await run.post(asked)
            assert (busy.status_code, busy.headers["retry-after"]) == (529, "3")
            assert (await run.post(asked)).status_code == 307
            with pytest.raises(httpx2.RemoteProtocolError):
                await run.post(asked)
            answer = await run.post(asked, "/v1/messages?beta=true")
            assert b'"tool_use"' in answer.content
            assert answer.content.endswith(b'{"type": "message_stop"}\n\n')
            assert run.gateway.counts.requests == 4
    assert [headers["x-api-key"] for headers, _ in script.asked] == [KEY] * 4
