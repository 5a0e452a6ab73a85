"""The way of a call as OpenTelemetry spans, and that they hold no contents."""

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from mcp import Client
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.telemetry.calls import span
from tests.server.scripted import one_chat

SECRET = "s3cret-words"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Set up an SDK as an operator's program would, for this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # The API lets a provider be set once in a process; tests need their own each.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    for module in ("mcp.shared._otel", "mcp_sandbox.telemetry.calls"):
        monkeypatch.setattr(f"{module}._tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def test_without_an_sdk_a_span_is_nothing_at_all() -> None:
    assert span("a", op="b") is span("c")


async def test_a_call_is_followed_from_the_client_into_the_sandbox(
    tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    config = Config(data_dir=tmp_path / "data", backend="unsafe-local")
    with anyio.fail_after(30):
        async with open_manager(config) as manager:
            sessions = make_session_finder(one_chat(ChatId("me", "traced")), manager.session)
            async with Client(build_server(sessions)) as client:
                await client.call_tool("exec", {"command": f"echo {SECRET}"})
    spans = exported.get_finished_spans()
    (run,) = (each for each in spans if each.name == "runtime run")
    assert ancestors(run, spans)[:2] == ["call", "tools/call exec"]
    (inside,) = (each for each in spans if each.name == "runner run")
    assert ancestors(inside, spans)[:2] == ["call", "tools/call exec"]
    (opened,) = (each for each in spans if each.name == "session open")
    assert ancestors(opened, spans)[0] == "call"
    (call,) = (each for each in spans if each.name == "call")
    told = dict(call.attributes or {})
    assert told.pop("mcp_sandbox.call")
    assert told.pop("mcp_sandbox.duration_ms")
    assert told == {
        "mcp_sandbox.chat": "me/traced",
        "mcp_sandbox.backend": "unsafe-local",
        "mcp_sandbox.tool": "exec",
        "mcp_sandbox.outcome": "ok",
        "mcp_sandbox.exit_code": 0,
    }


async def test_spans_hold_no_contents_even_of_failures(
    tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    config = Config(data_dir=tmp_path / "data", backend="unsafe-local")
    with anyio.fail_after(30):
        async with open_manager(config) as manager:
            sessions = make_session_finder(one_chat(ChatId("me", "traced")), manager.session)
            async with Client(build_server(sessions)) as client:
                await client.call_tool("run_code", {"code": f"print('{SECRET}')"})
                await client.call_tool("read_file", {"path": f"{SECRET}/absent"})
                await client.call_tool("read_file", {"path": 5, SECRET: SECRET})
    spans = exported.get_finished_spans()
    failed = (each for each in spans if each.name == "call" and not each.status.is_ok)
    assert [(each.attributes or {})["error.type"] for each in failed] == [
        "NotFound",
        "InvalidArgument",
    ]
    assert SECRET not in json.dumps([json.loads(each.to_json()) for each in spans])


def ancestors(one: ReadableSpan, spans: tuple[ReadableSpan, ...]) -> list[str]:
    """The names of the spans around it, the innermost first."""
    by_id = {each.context.span_id: each for each in spans if each.context}
    names = list[str]()
    while one.parent is not None and one.parent.span_id in by_id:
        one = by_id[one.parent.span_id]
        names.append(one.name)
    return names
