"""An event is one line, in text or JSON, whatever is in its fields."""

import json
import logging
from collections.abc import Iterator

import pytest

from mcp_sandbox.telemetry import logs

logger = logging.getLogger("mcp_sandbox.test")
HOSTILE = 'a"b\nERROR forged: line\x1b[31m'


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mcp_sandbox")
    before = root.handlers[:], root.level, ours.level
    # Only what is configured here may write; the test runner's own handlers come back after.
    root.handlers = []
    yield
    root.handlers, root.level = before[0], before[1]
    ours.setLevel(before[2])


def test_text_is_one_line_with_plain_and_quoted_values(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    logs.event(logger, "call", chat="local/x", call=HOSTILE, duration_ms=1.5, backend=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert " INFO mcp_sandbox.test: call chat=local/x call=" in line
    assert line.endswith(f"call={json.dumps(HOSTILE)} duration_ms=1.5")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.event(logger, "call", chat="local/x", call=HOSTILE, duration_ms=1.5)
    logger.warning("plain %s", "words")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("timestamp")
    assert first == {
        "level": "INFO",
        "logger": "mcp_sandbox.test",
        "event": "call",
        "chat": "local/x",
        "call": HOSTILE,
        "duration_ms": 1.5,
    }
    assert (second["level"], second["event"]) == ("WARNING", "plain words")


def test_long_values_are_cut_and_the_chatter_of_others_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("text")
    logs.event(logger, "call", call="x" * 5000)
    logging.getLogger("somebody.else").info("chatter")
    assert len(capsys.readouterr().err) < 400
