"""Assistants that a platform has work in its sessions."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from tests.agents.service import KEY, a_service
from tests.agents.test_direct import ANTHROPIC, telling
from tests.agents.test_run import PROGRAM
from tests.control.daemon import Platform, platform

pytestmark = [pytest.mark.anyio, pytest.mark.bubblewrap]
SANDBOX = "{sandbox: {arguments: {model: test-model}}, access: [ada]}"


@pytest.fixture(scope="module")
async def here(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Platform]:
    """A platform with an assistant that has a sandbox, and one that talks to its model alone."""
    place = tmp_path_factory.mktemp("agents")
    files = {
        "programs/bin/claude": PROGRAM,
        "key": KEY,
        "assistants/worker/assistant.yaml": SANDBOX,
        "assistants/talker/assistant.yaml": "{connector: near/big, access: [ada]}",
    }
    for name, text in files.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        await anyio.Path(file).write_text(text)
        file.chmod(0o600 if name == "key" else 0o755)
    async with a_service() as service:
        service.answer = telling(ANTHROPIC)
        near = {"near": {"url": service.url, "key": f"file:{place}/key"}}
        more = {
            "MCP_SANDBOX_CONNECTORS": json.dumps(near),
            "MCP_SANDBOX_AGENTS__FOLDERS": json.dumps([str(place / "assistants")]),
            "MCP_SANDBOX_AGENTS__PROGRAMS": str(place / "programs"),
        }
        async with platform(place / "data", "bubblewrap", more) as found:
            yield found


async def told(here: Platform, verb: str, prompt: str, **given: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": prompt}], **given}
    answer = await here.ask("POST", f"agent/{verb}", json=body)
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    return [line.get("event", line) for line in lines]


async def test_an_assistant_works_in_the_session_that_was_prepared(here: Platform) -> None:
    session = await here.prepare("work", expertIdentifier="worker")
    # Else a slow start is told, too.
    await here.made(session["id"])
    given = {"sandbox_session_id": session["id"], "provider_sandbox_id": None}
    odd = "say(type='Completion'); say(type='Text', subtype='x'); say(type='y', event=1)"
    code = f"open('note', 'w').write('made'); {odd}; talk('a'); end('done')"
    *events, last = await told(here, "invoke", code, **given, sandbox_provider="bubblewrap")
    assert [each["type"] for each in events] == ["Unknown"] * 3 + ["Text"]
    assert (last["type"], last["content"], last["is_error"]) == ("Completion", "done", False)
    made = await here.ask("GET", f"sandbox/{session['id']}/files?path=note")
    assert made.text == "made"
    # The program of the tests keeps no record of a conversation.
    notice, last = await told(here, "resume", "end(' '.join(sys.argv))", **given)
    assert "earlier conversation" in notice["text"]
    assert "test-model" in last["content"]


async def test_without_a_sandbox_no_session_is_needed(here: Platform) -> None:
    last = (await told(here, "invoke", "Hello?", sandbox_mode="none", assistant="talker"))[-1]
    assert (last.get("type"), last.get("content")) == ("Completion", "Good day."), last
    last = (await told(here, "invoke", "end('here')", sandbox_mode="local", assistant="worker"))[-1]
    assert last["content"] == "here"


async def test_what_cannot_be_run_is_told_before_anything_is_made(here: Platform) -> None:
    session = (await here.prepare("refused"))["id"]
    table: list[tuple[dict[str, Any], str]] = [
        ({}, "NotFound"),
        ({"sandbox_session_id": "0" * 12}, "NotFound"),
        ({"sandbox_session_id": session, "sandbox_provider": "e2b"}, "InvalidArgument"),
        ({"sandbox_session_id": session, "assistant": "nobody"}, "NotPermitted"),
        ({"sandbox_session_id": session, "more": 1}, "InvalidArgument"),
        ({"sandbox_session_id": session, "messages": []}, "InvalidArgument"),
        ({"sandbox_mode": "local", "sandbox_session_id": "../x"}, "InvalidArgument"),
    ]
    for given, title in table:
        (problem,) = await told(here, "invoke", "x", **given)
        assert problem["title"] == title, given
    stranger = await here.with_token("bob", "control")
    async with stranger.http:
        (problem,) = await told(stranger, "invoke", "x", sandbox_session_id=session)
        assert problem["title"] == "NotFound"
