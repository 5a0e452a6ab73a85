"""Requests of a program inside reach its model service judged, with the key, and nothing else."""

import gzip
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import UNIXSocketStream

from mcp_sandbox.models import ChatId
from tests.agents.service import (
    CHAT,
    KEY,
    MESSAGE,
    OPENAI,
    a_run,
    a_service,
    hanging,
)
from tests.streams import everything


async def test_the_key_takes_the_place_of_the_token(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        answer = await run.client.post(
            "/v1/messages?beta=true",
            json=MESSAGE,
            headers={
                "anthropic-version": "2023-06-01",
                "cookie": "a=b",
                "x-forwarded-for": "10.0.0.1",
                "authorization": "Bearer mine",
                "proxy-authorization": "Basic mine",
                "api-key": "mine",
                "x-odd": "1",
            },
        )
        assert answer.json() == {"usage": {"output_tokens": 1}}
        (heard,) = service.heard
        assert heard.line == "POST /v1/messages?beta=true HTTP/1.1"
        assert heard.headers["x-api-key"] == KEY
        assert heard.headers["anthropic-version"] == "2023-06-01"
        dropped = {"cookie", "x-forwarded-for", "authorization", "proxy-authorization", "api-key"}
        assert not heard.headers.keys() & {*dropped, "x-odd"}
        assert heard.body == MESSAGE
        assert run.gateway.token not in str(heard)


async def test_a_key_can_go_as_bearer_and_a_token_come_so(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service, auth="bearer") as run:
        await run.client.post(
            "/v1/messages",
            json=MESSAGE,
            headers={"x-api-key": "", "authorization": f"Bearer {run.gateway.token}"},
        )
        headers = service.heard[0].headers
        assert headers["authorization"] == f"Bearer {KEY}"
        assert "x-api-key" not in headers


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, ["POST /v1/messages", "POST /v1/messages/count_tokens", "GET /v1/models"]),
        (OPENAI, ["POST /v1/chat/completions", "POST /v1/responses", "GET /v1/models"]),
    ],
)
async def test_what_the_protocol_needs_is_let_through(
    tmp_path: Path, settings: Any, asked: list[str]
) -> None:
    async with a_service() as service, a_run(tmp_path, service, **settings) as run:
        for each in asked:
            method, path = each.split()
            body = MESSAGE if method == "POST" else None
            assert (await run.client.request(method, path, json=body)).status_code == 200
        assert [heard.line.removesuffix(" HTTP/1.1") for heard in service.heard] == asked


async def test_a_look_at_whether_it_is_there_needs_no_token_and_goes_nowhere(
    tmp_path: Path,
) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        assert (await run.client.head("/", headers={"x-api-key": ""})).status_code == 200
        assert not service.heard


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/messages"),
        ("POST", "/v1/complete"),
        ("POST", "/v1/files"),
        ("POST", "/v1/messages/batches"),
        ("POST", "/v1/messages/"),
        ("POST", "/v1/%6Dessages"),
        ("POST", "/v1/../v1/messages"),
        ("POST", "//v1/messages"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/chat/completions"),
    ],
)
async def test_anything_else_is_not_there(tmp_path: Path, method: str, path: str) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        said = await run.say(run.head(f"{method} {path}", "Content-Length: 0"))
        assert said.startswith(b"HTTP/1.1 404 ")
        assert b'"type":"not_found_error"' in said
        assert not service.heard


async def test_a_token_is_good_for_its_own_run_alone(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        async with a_run(tmp_path, service, chat=ChatId("bob", "two")) as other:
            for token in ("", "x", KEY, other.gateway.token, run.gateway.token[:-1]):
                answer = await run.client.post(
                    "/v1/messages", json=MESSAGE, headers={"x-api-key": token}
                )
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["connection"] == "close"
        assert not service.heard


async def test_the_end_of_a_run_cuts_its_requests_and_lets_in_no_others(tmp_path: Path) -> None:
    async with a_service() as service:
        service.answer = hanging
        async with a_run(tmp_path, service) as run:
            stream, asked = await run.connect(), run.head("GET /v1/models")
            await stream.send(asked)
            with anyio.fail_after(5):
                await service.asked.wait()
        async with stream:
            with anyio.fail_after(2):
                await service.gone.wait()
                assert await everything(stream) == b""
                pair = [await UNIXSocketStream.from_socket(end) for end in socket.socketpair()]
                async with pair[0] as program, pair[1] as door:
                    await program.send(asked)
                    await run.serve(door)
                    await door.aclose()
                    assert await everything(program) == b""


async def test_who_asks_is_a_digest_of_user_and_chat(tmp_path: Path) -> None:
    async with a_service() as service:
        body = {**MESSAGE, "metadata": {"user_id": {"account": "me@example.com"}}}
        for chat in (CHAT, CHAT, ChatId("alice", "two")):
            async with a_run(tmp_path, service, chat=chat) as run:
                await run.post(body)
        first, again, other = (heard.body["metadata"]["user_id"] for heard in service.heard)
        assert first == again != other
        assert first.isalnum()
        assert "alice" not in first


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "mine", "input_schema": {}}, {"type": "code_execution_20250825"}]},
        {"tools": {"type": "web_fetch_20250910"}},
        {"tools": [{"type": ["custom"]}]},
        {"mcp_servers": [{"type": "url", "url": "https://a.example"}]},
        {"container": "abc"},
        {"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"content": [{"type": "document", "source": {"type": "file"}}]}]},
        {
            "messages": [
                {
                    "content": [
                        {
                            "type": "tool_result",
                            "content": [{"type": "image", "source": {"type": "url", "url": "x"}}],
                        }
                    ]
                }
            ]
        },
        {"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
        {
            "messages": [
                {
                    "content": {
                        "type": "document",
                        "source": {
                            "type": "content",
                            "content": [{"type": "image", "source": {"type": "url"}}],
                        },
                    }
                }
            ]
        },
    ],
)
async def test_a_service_does_not_reach_a_network_for_a_sandbox(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    async with a_service() as service:
        async with a_run(tmp_path, service) as run:
            answer = await run.post({**MESSAGE, **more})
            assert answer.status_code == 400
            assert answer.json()["type"] == "error"
            said = answer.json()["error"]
            assert said["type"] == "invalid_request_error"
            assert "connectors.one.server_tools" in said["message"]
            assert not service.heard
        async with a_run(tmp_path, service, server_tools=True) as run:
            assert (await run.post({**MESSAGE, **more})).status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "web_search_preview"}]},
        {"tools": [{"type": "mcp", "server_url": "https://a.example"}]},
        {"web_search_options": {}, "plugins": [{"id": "web"}]},
        {"background": True},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://a"}}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": "http://a"}]}]},
        {"input": [{"content": [{"type": "input_file", "file_url": "https://a"}]}]},
        {"input": [{"output": [{"type": "input_image", "image_url": "https://a"}]}]},
        {"input": [{"output": {"type": "computer_screenshot", "image_url": "https://a"}}]},
    ],
)
async def test_nor_does_one_of_the_other_protocol(tmp_path: Path, more: dict[str, Any]) -> None:
    async with a_service() as service, a_run(tmp_path, service, **OPENAI) as run:
        answer = await run.post({"model": "big", **more}, "/v1/responses")
        assert answer.status_code == 400
        assert "connectors.one.server_tools" in answer.json()["error"]["message"]
        assert not service.heard


async def test_what_the_program_runs_itself_and_brings_along_goes_through(tmp_path: Path) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    url = {"source": {"type": "url"}, "image_url": "https://a.example"}
    body = {
        **MESSAGE,
        "system": [{"type": "text", "text": "be kind"}],
        "tools": [
            {"name": "a", "input_schema": {"properties": {"source": {"type": "url"}}}},
            {"type": "custom", "name": "b", "input_schema": {}},
        ],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": url}]},
            {"role": "user", "content": [{"type": "image", "source": image}]},
        ],
    }
    async with a_service() as service, a_run(tmp_path, service) as run:
        assert (await run.post(body)).status_code == 200
        assert service.heard[0].body == body
    mine: dict[str, Any] = {
        "model": "big",
        "tools": [{"type": "function", "name": "a"}],
        "mcp_servers": [],
    }
    shown = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    async with a_service() as service, a_run(tmp_path, service, **OPENAI) as run:
        mine["input"] = [{"role": "user", "content": [shown]}]
        assert (await run.post(mine, "/v1/responses")).status_code == 200


async def test_the_service_reads_what_was_judged(tmp_path: Path) -> None:
    """Of a name that stands twice, two readers may take either."""
    raw = b'{"tools": [{"type": "web_search"}], "model": "huge", "model": "big", "tools": [] }'
    async with a_service() as service, a_run(tmp_path, service, models=["big"]) as run:
        answer = await run.client.post("/v1/messages", content=raw)
        assert answer.status_code == 200
        assert service.heard[0].raw == b'{"tools":[],"model":"big"}'


async def test_only_the_named_models_can_be_asked(tmp_path: Path) -> None:
    async with a_service() as service:
        async with a_run(tmp_path, service, model="main", models=["small"]) as run:
            for model in ("main", "small"):
                assert (await run.post({**MESSAGE, "model": model})).status_code == 200
            for other in ("huge", None, ["main"]):
                answer = await run.post({**MESSAGE, "model": other})
                assert answer.status_code == 400
                said = answer.json()["error"]["message"]
                assert said.endswith("connectors.one.models has main, small")
        assert len(service.heard) == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages":' + b'[{"content":' * 4000 + b"0" + b"}]" * 4000 + b"}",
        gzip.compress(b"{}", mtime=0),
    ],
)
async def test_what_is_no_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        answer = await run.client.post("/v1/messages", content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not service.heard


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"[]," * 500_000 + b"[]]",
        b"[" + (b"9" * 4300 + b",") * 1000 + b"0]",
        b"{" + b'"":0,' * 500_000 + b'"":0}',
        b'"' * (20 << 20),
        b'"' + rb"\\" * 1000 + b'",' + b"1," * 600_000,
    ],
)
async def test_a_body_that_would_take_long_to_read_is_refused(tmp_path: Path, raw: bytes) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        answer = await run.client.post("/v1/messages", content=raw)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"
        assert not service.heard


async def test_a_large_body_goes_through_whole(tmp_path: Path) -> None:
    async with a_service() as service, a_run(tmp_path, service) as run:
        body = {**MESSAGE, "system": 'é, [9\\n"{' * (2 << 20)}
        assert (await run.post(body)).status_code == 200
        assert service.heard[0].body == body
