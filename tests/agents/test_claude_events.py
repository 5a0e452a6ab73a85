"""What the lines of the Claude command line mean, as version 2.1.332 prints them."""

import json
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from mcp_sandbox.agents.events import (
    Completion,
    Event,
    Notice,
    Progress,
    Started,
    Text,
    ToolCall,
    ToolResult,
    Unknown,
)
from mcp_sandbox.agents.executors import find_executor
from mcp_sandbox.agents.executors.base import ModelAccess, Run
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.agents.messages import read_conversation
from mcp_sandbox.errors import InvalidArgument
from tests.agents.test_messages import said

RESULT = {
    "duration_ms": 909,
    "session_id": "s-1",
    "total_cost_usd": 0.5,
    "usage": {
        "input_tokens": 3,
        "cache_creation_input_tokens": 20,
        "cache_read_input_tokens": 100,
        "output_tokens": 7,
    },
    "terminal_reason": "completed",
    "is_error": False,
    "num_turns": 3,
    "subtype": "success",
    "result": "All done.",
    "type": "result",
}


def told(*lines: object) -> list[Event]:
    """The events of a stream of JSON lines, or of bytes as they are."""
    claude = Claude()
    return [
        event
        for line in lines
        for event in claude.events(line if isinstance(line, bytes) else json.dumps(line).encode())
    ]


def piece(text: str, parent: str | None = None) -> dict[str, Any]:
    delta = {"type": "text_delta", "text": text}
    event = {"type": "content_block_delta", "index": 0, "delta": delta}
    return {"type": "stream_event", "event": event, "parent_tool_use_id": parent}


def message(role: str, *blocks: object, parent: str | None = None) -> dict[str, Any]:
    content = {"role": role, "content": list(blocks)}
    return {"type": role, "message": content, "parent_tool_use_id": parent}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_a_turn_is_told_in_its_order() -> None:
    assert told(
        {"type": "system", "subtype": "init", "session_id": "s-1", "model": "opus", "tools": []},
        {"type": "system", "subtype": "status", "status": "requesting"},
        {"type": "stream_event", "event": {"type": "message_start", "message": {}}},
        message(
            "assistant",
            {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
        ),
        message("user", {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}),
        RESULT,
    ) == [
        Started("s-1", "opus"),
        ToolCall("t1", "Bash", {"command": "ls"}),
        ToolResult("t1", "a.txt"),
        Completion(
            "All done.",
            cost_usd=0.5,
            turns=3,
            session_id="s-1",
        ),
    ]


def test_a_text_that_came_in_pieces_is_not_told_again_as_a_whole() -> None:
    assert told(
        piece("All "),
        piece("done."),
        message("assistant", text("All done.")),
        piece("And"),
        message("assistant", text("And more.")),
        message("assistant", text("API Error: 529")),
    ) == [
        Text("All ", partial=True),
        Text("done.", partial=True),
        Text("And", partial=True),
        Text(" more."),
        Text("API Error: 529"),
    ]


def test_words_of_a_sub_agent_are_no_text_of_the_agent() -> None:
    assert told(
        piece("Main", parent=None),
        piece("sub", parent="t1"),
        message("assistant", text("sub"), parent="t1"),
        message("assistant", text("Main")),
    ) == [Text("Main", partial=True), Progress("sub")]


def test_a_failing_tool_and_pictures_are_told_as_text() -> None:
    blocks = [text("a"), {"type": "image", "source": {}}, text("b")]
    assert told(
        message(
            "user",
            {"type": "tool_result", "tool_use_id": "t1", "content": blocks, "is_error": True},
        )
    ) == [ToolResult("t1", "a\n[image]\nb", is_error=True)]


def test_retries_limits_and_summaries_are_notices() -> None:
    retry = {"type": "system", "subtype": "api_retry", "attempt": 1, "error_status": 529}
    notices = told(
        {**retry, "error": "overloaded"},
        {"type": "rate_limit_event", "rate_limit_info": {"status": "allowed_warning"}},
        {"type": "system", "subtype": "compact_boundary"},
    )
    assert all(isinstance(each, Notice) for each in notices)
    assert notices[0] == Notice("the model service answered 529 (overloaded): retry 1")
    assert len(notices) == 3


def test_a_model_error_is_one_though_its_line_says_success() -> None:
    said = {**RESULT, "is_error": True, "terminal_reason": "api_error", "result": "API Error: 529"}
    (event,) = told(said)
    assert isinstance(event, Completion)
    assert event.is_error
    assert event.reason == "api_error: API Error: 529"


def test_a_limit_that_was_met_says_which() -> None:
    said: dict[str, Any] = {**RESULT, "is_error": True, "subtype": "error_max_turns"}
    said |= {"terminal_reason": "max_turns", "errors": ["Reached maximum number of turns (1)"]}
    del said["result"]
    (event,) = told(said)
    assert isinstance(event, Completion)
    assert event.reason == "max_turns: Reached maximum number of turns (1)"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (b"Segmentation fault", Unknown("", "Segmentation fault")),
        (b"\xff\xfe{}", Unknown("", "\ufffd\ufffd{}")),
        (b"x" * 1000, Unknown("", "x" * 200)),
        (b"[" * 100_000, Unknown("", "[" * 200)),
        (b"9" * 5000, Unknown("", "9" * 200)),
        (b"[1]", Unknown("", "[1]")),
        (b"null", Unknown("", "null")),
        (b'{"type":"new"}', Unknown("new", '{"type":"new"}')),
        (b'{"type":"result"}', Unknown("result", '{"type":"result"}')),
        (
            b'{"type":"system","subtype":"x"}',
            Unknown("system/x", '{"type":"system","subtype":"x"}'),
        ),
    ],
)
def test_what_is_not_understood_is_told_as_unknown(line: bytes, event: Unknown) -> None:
    assert told(line) == [event]


LINES = (
    RESULT,
    {"type": "system", "subtype": "init", "session_id": "s-1", "model": "opus"},
    {"type": "system", "subtype": "api_retry", "attempt": 1},
    {"type": "rate_limit_event", "rate_limit_info": {"status": "rejected"}},
    piece("All"),
    message("assistant", text("All"), {"type": "tool_use", "id": "1", "name": "B", "input": {}}),
    message("user", {"type": "tool_result", "tool_use_id": "1", "content": [text("a")]}),
)
ODD: tuple[object, ...] = (None, 5, -0.5, True, "x", "", [], [[]], [None], {}, {"type": "text"})


def altered(value: Any, odd: object) -> Iterator[Any]:
    """The value with each of its parts replaced, one at a time."""
    yield odd
    inner = value if isinstance(value, dict | list) else []
    for key in inner if isinstance(inner, dict) else range(len(inner)):
        for part in altered(value[key], odd):
            changed = copy(value)
            changed[key] = part
            yield changed


@pytest.mark.parametrize("line", LINES)
def test_whatever_is_odd_in_a_line_raises_nothing(line: dict[str, Any]) -> None:
    for odd in ODD:
        for changed in altered(line, odd):
            told(changed, piece("more"), *LINES)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"max_turns": 20.5}, "max_turns: .*fractional part"),
        ({"max_turns": "x"}, "max_turns: .*valid integer"),
        ({"max_turns": -1}, "max_turns: .*greater than or equal to 0"),
        ({"turns": 3}, "turns: Extra inputs.*There are: max_turns, permission_mode, allowed_tools"),
        ({"permission_mode": "yolo"}, "permission_mode: .*'acceptEdits', 'auto', 'bypassPerm"),
        ({"allowed_tools": ["--mcp-config"]}, "allowed_tools.0"),
        ({"model": "--help"}, "model"),
        ({"max_budget_usd": float("inf")}, "max_budget_usd"),
    ],
)
def test_arguments_that_it_does_not_have_are_named(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Claude.read(arguments, "these")


@pytest.mark.parametrize("mode", ["acceptEdits", "dontAsk", "plan", "bypassPermissions"])
def test_the_tools_of_the_host_are_allowed_in_each_mode(mode: str) -> None:
    claude = Claude.read({"permission_mode": mode, "allowed_tools": ["Read"]}, "these")
    way = ModelAccess("", "key", tools={"command": "relay"}, tool_names=["sums__add", "shout"])
    argv = claude.command(Run("/tmp/run", read_conversation([said("user", "Add.")]), way)).argv
    first = argv.index("--allowed-tools")
    allowed = ["Read", "mcp__host__sums__add", "mcp__host__shout", "--disallowed-tools"]
    assert argv[first + 1 : first + 5] == allowed


def test_commands_are_found_by_name_alone() -> None:
    assert find_executor("claude") is Claude
    with pytest.raises(InvalidArgument, match="options cannot be empty"):
        find_executor("")
    with pytest.raises(InvalidArgument, match="unknown command type: emacs: choose one of claude"):
        find_executor("emacs")
    with pytest.raises(
        InvalidArgument, match=r"cursor is not run here: .*key would have to be inside"
    ):
        find_executor("cursor")
