"""An assistant without a sandbox talks to its model through the same hooks, and nothing is made."""

import json
import os
import re
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio import to_thread
from anyio.abc import SocketStream

from mcp_sandbox import open_agent
from mcp_sandbox.agents.events import Completion, Notice, Text, Usage
from mcp_sandbox.audit.log import events
from mcp_sandbox.config import AgentsConfig, Config, ConnectorConfig
from mcp_sandbox.errors import InvalidArgument, NotPermitted, OperatorError, Unsupported
from mcp_sandbox.sessions.chat_records import ChatRecords
from tests.agents.service import KEY, STREAM_HEAD, Answer, Service, a_service, chunk, saying
from tests.agents.test_messages import PICTURE, said, text

HOOKS = """
async def create(ctx, messages, options):
    assert ctx.sandbox is None
    if "forbidden" in str(messages):
        raise RuntimeError("this is not to be done")
    ctx.memory["runs"] = ctx.memory.get("runs", 0) + 1
    return messages

async def next(ctx, payload, options):
    raise RuntimeError(f"run {ctx.memory['runs']}")
"""
USED = {"input_tokens": 7, "output_tokens": 3}
ANTHROPIC: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Good "}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "day."}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USED},
    {"type": "message_stop"},
]
OPENAI: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "Good "}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "day."}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
]
END = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}
OVER = {"type": "error", "error": {"type": "overloaded_error", "message": "too many"}}


def telling(events: list[dict[str, Any]], *, cut: bool = False) -> Answer:
    """Stream these events; a cut answer ends without its end."""

    async def answer(stream: SocketStream) -> None:
        lines = "".join(f"event: x\r\ndata: {json.dumps(event)}\r\n\r\n" for event in events)
        await stream.send(
            STREAM_HEAD + chunk(lines.rstrip().encode()) + (b"" if cut else chunk(b""))
        )
        if cut:
            await stream.aclose()

    return answer


async def silence(stream: SocketStream) -> None:
    await stream.send(STREAM_HEAD + chunk(f"data: {json.dumps(ANTHROPIC[1])}\n\n".encode()))
    await stream.receive()


@pytest.fixture
async def service() -> AsyncGenerator[Service]:
    async with a_service() as opened:
        opened.answer = telling(ANTHROPIC)
        yield opened


@pytest.fixture
def config(service: Service, tmp_path: Path) -> Config:
    """Two assistants that have no sandbox, one with hooks, and the service by both protocols."""
    for name in ("talker", "keeper"):
        folder = tmp_path / "assistants" / name
        folder.mkdir(parents=True)
        (folder / "assistant.yaml").write_text("connector: one/big\n")
        (folder / "prompts.yml").write_text(yaml.safe_dump([{"content": "Be polite."}]))
    (folder / "hooks.py").write_text(HOOKS)
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    other = ConnectorConfig(url=f"{service.url}/v1", protocol="openai", key=f"file:{key}")
    return Config(
        data_dir=tmp_path / "data",
        connectors={
            "one": ConnectorConfig(url=service.url, key=f"file:{key}"),
            "other": other,
        },
        agents=AgentsConfig(
            folders=(folder.parent,), usage_log=tmp_path / "usage.jsonl", connector="one"
        ),
    )


TALK = [said("user", "Hello?"), said("assistant", "Yes?"), said("user", [PICTURE, text("This.")])]


async def test_one_call_of_the_model_is_told_as_it_comes_and_starts_nothing(
    config: Config, service: Service, tmp_path: Path
) -> None:
    async with open_agent("talker", config=config) as agent:
        *events, last = [event async for event in agent.stream(TALK)]
    assert events == [Text("Good ", partial=True), Text("day.", partial=True)]
    assert isinstance(last, Completion)
    assert (last.content, last.is_error, last.turns) == ("Good day.", False, 1)
    assert last.usage == Usage(7, 3, 10)
    (heard,) = service.heard
    assert (heard.line, heard.headers["x-api-key"]) == ("POST /v1/messages HTTP/1.1", KEY)
    assert heard.headers["anthropic-version"]
    assert heard.body["model"] == "big"
    assert heard.body["system"] == "Be polite."
    assert heard.body["messages"] == [
        said("user", [text("Hello?")]),
        said("assistant", [text("Yes?")]),
        said("user", [text("This."), PICTURE]),
    ]
    assert json.loads((tmp_path / "usage.jsonl").read_text())["usage"]["output"] == 3
    assert [*(config.data_dir / "sandbox").iterdir()] == [config.data_dir / "sandbox" / "audit"]


async def test_a_service_of_the_other_protocol_is_asked_in_its_own_words(
    config: Config, service: Service
) -> None:
    service.answer = telling(OPENAI)
    async with open_agent("talker", connector="other/v3", config=config) as agent:
        *events, last = [event async for event in agent.stream(TALK)]
    assert events == [Text("Good ", partial=True), Text("day.", partial=True)]
    assert isinstance(last, Completion)
    assert (last.content, last.reason, last.usage) == ("Good day.", "", Usage(7, 3, 10))
    (heard,) = service.heard
    assert heard.line.startswith("POST /v1/chat/completions ")
    assert heard.headers["authorization"] == f"Bearer {KEY}"
    assert heard.body["model"] == "v3"
    system, *_, prompt = heard.body["messages"]
    assert system == {"role": "system", "content": "Be polite."}
    assert prompt["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw0K"


async def test_hooks_have_no_sandbox_and_what_they_keep_is_kept(config: Config) -> None:
    for number in (1, 2):
        async with open_agent("keeper", config=config) as agent:
            *_, notice, last = [event async for event in agent.stream(TALK)]
        assert notice == Notice(f"the hook next failed: run {number}")
        assert isinstance(last, Completion)
        assert last.content == "Good day."


@pytest.mark.parametrize(
    ("assistant", "answer", "outcome"),
    [
        ("talker", telling(ANTHROPIC), "ok"),
        ("keeper", saying(b"", "529 Overloaded"), "ok"),
        ("talker", silence, "cancelled"),
    ],
)
async def test_a_run_without_a_sandbox_is_in_the_audit(
    config: Config, service: Service, assistant: str, answer: Answer, outcome: str
) -> None:
    service.answer = answer
    async with open_agent(assistant, "work", timeout_s=3, config=config) as agent:
        await agent.execute(TALK)
    begun, ended = await to_thread.run_sync(_recorded, config)
    assert (begun["kind"], begun["user"], begun["tool"]) == ("begun", "local", "direct")
    assert "POST /v1/messages" in begun["arguments"]
    assert (ended["kind"], ended["of"], ended["outcome"]) == ("ended", begun["n"], outcome)


def _recorded(config: Config) -> list[dict[str, Any]]:
    return [told for _, told in events(config.data_dir / "sandbox" / "audit", "work")]


async def test_a_run_without_a_sandbox_is_a_use_of_what_its_hooks_keep(config: Config) -> None:
    async with open_agent("keeper", "work", config=config) as agent:
        await agent.execute(TALK)
        os.utime(config.data_dir / "sandbox/records/local/chat-work.json", (0, 0))
        await agent.execute(TALK)
    (found,) = await ChatRecords(config.data_dir).list()
    assert time.time() - found.used_s < 60


async def test_what_a_hook_refuses_is_not_asked(config: Config, service: Service) -> None:
    async with open_agent("keeper", config=config) as agent:
        with pytest.raises(NotPermitted, match="this is not to be done"):
            await agent.execute([said("user", "forbidden")])
    assert not service.heard


@pytest.mark.parametrize(
    ("answer", "reason", "content"),
    [
        (saying(b'{"error": "later"}', "429 Too Many Requests"), "answers 429: .*later", ""),
        (saying(b"", "529 Overloaded"), "answers 529", ""),
        (saying(b"", "302 Found", location="http://127.0.0.1:9"), "leads elsewhere", ""),
        (saying(KEY.encode(), "401 Unauthorized"), "answers 401: [^s]", ""),
        (telling(ANTHROPIC[:2], cut=True), "broke off its answer", "Good "),
        (telling([*ANTHROPIC[:2], OVER]), "api_error: too many", "Good "),
        (telling([*ANTHROPIC[:2], END]), "max_tokens: the model ended", "Good "),
    ],
)
async def test_an_answer_that_fails_says_why_and_what_there_was(
    answer: Answer, reason: str, content: str, config: Config, service: Service
) -> None:
    service.answer = answer
    async with open_agent("talker", config=config) as agent:
        last = await agent.execute(TALK)
    assert last.is_error
    assert last.content == content
    assert KEY not in last.reason
    assert re.search(reason, last.reason), last.reason
    assert len(service.heard) == 1


async def test_an_answer_that_stays_out_ends_with_its_time_limit(
    config: Config, service: Service
) -> None:
    service.answer = silence
    async with open_agent("talker", timeout_s=3, config=config) as agent:
        last = await agent.execute(TALK)
    assert (last.content, last.is_error) == ("Good ", True)
    assert last.reason.startswith("timeout: ")
    await service.gone.wait()


async def test_who_stops_listening_ends_the_call(config: Config, service: Service) -> None:
    service.answer = silence
    async with open_agent("talker", config=config) as agent:
        with anyio.CancelScope() as scope:
            async for _ in agent.stream(TALK):
                scope.cancel()
        await service.gone.wait()


async def test_what_takes_a_sandbox_is_refused_with_the_line_to_add(config: Config) -> None:
    async with open_agent("talker", config=config) as agent:
        with pytest.raises(Unsupported, match=r"add `sandbox: \{\}`"):
            await agent.exec(["true"])
        with pytest.raises(InvalidArgument, match="give the earlier messages"):
            await agent.execute(TALK, resume=True)


async def test_a_check_says_whether_the_service_takes_the_key(
    config: Config, service: Service
) -> None:
    service.answer = saying(b"{}", "404 Not Found")
    async with open_agent("talker", config=config) as agent:
        assert await agent.check() == {"program": "none", "model": "answers 404", "tools": "none"}
        service.answer = saying(b"who?", "401 Unauthorized")
        with pytest.raises(OperatorError, match=r"401: who.*correct its url or key"):
            await agent.check()
