"""Every call is told of once: a line of the log and a count, without contents."""

import logging
from pathlib import Path

import anyio
import pytest
from mcp import Client

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import CapacityReached, NotFound, SandboxError, SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.telemetry.metrics import Metrics
from tests.server.scripted import failing, one_chat

SECRET = "s3cret-words"
CHAT = ChatId("me", "observed")


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record) for record in caplog.records if record.message == "call"]


async def test_a_call_is_one_line_without_its_contents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    metrics = Metrics()
    config = Config(data_dir=tmp_path / "data", backend="unsafe-local")
    async with open_manager(config) as manager:
        server = build_server(
            make_session_finder(one_chat(CHAT), manager.session), count=metrics.count
        )
        async with Client(server) as client:
            await client.call_tool("run_code", {"code": f"print('{SECRET}')"})
            await client.call_tool("write_file", {"path": f"{SECRET}.txt", "content": SECRET})
            await client.call_tool("read_file", {"path": f"{SECRET}/absent"})
    told = events(caplog)
    assert [(line["tool"], line["outcome"]) for line in told] == [
        ("run_code", "ok"),
        ("write_file", "ok"),
        ("read_file", "caller_error"),
    ]
    assert {(line["chat"], line["backend"]) for line in told} == {("me/observed", "unsafe-local")}
    assert len({line["call"] for line in told}) == 3
    assert all(isinstance(line["duration_ms"], float) for line in told)
    assert SECRET not in str([vars(record) for record in caplog.records])
    assert {figures.tool: figures.failed for figures in metrics.snapshot()} == {
        "run_code": 0,
        "write_file": 0,
        "read_file": 1,
    }


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotFound("x"), "caller_error"),
        (CapacityReached("x"), "operator_error"),
        (SandboxGone("x"), "sandbox_gone"),
        (SandboxError("x"), "fault"),
        (ZeroDivisionError("x"), "fault"),
        (ExceptionGroup("", [SandboxGone("x")]), "sandbox_gone"),
    ],
)
async def test_the_outcome_says_who_can_mend_it(
    error: Exception, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    session, metrics = failing(error), Metrics()

    async def session_for(_request: object) -> object:
        return session

    async with Client(build_server(session_for, count=metrics.count)) as client:  # type: ignore[arg-type]
        await client.call_tool("exec", {"command": "true"})
        await client.call_tool("exec", {"nonsense": 1})
    assert [line["outcome"] for line in events(caplog)] == [outcome, "caller_error"]


async def test_a_cancelled_call_is_told_of_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    began = anyio.Event()

    async def session_for(_request: object) -> object:
        began.set()
        await anyio.sleep_forever()
        return None

    with anyio.fail_after(10):
        async with Client(build_server(session_for)) as client, anyio.create_task_group() as tasks:  # type: ignore[arg-type]
            tasks.start_soon(client.call_tool, "exec", {"command": "true"})
            await began.wait()
            tasks.cancel_scope.cancel()
    assert [line["outcome"] for line in events(caplog)] == ["cancelled"]
