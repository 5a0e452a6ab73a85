"""An event is one line, in text or JSON, whatever is in its fields."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sandbox.telemetry import logs
from mcp_sandbox.telemetry.calls import recorded

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


@pytest.mark.parametrize("risk", ["safe", "medium", "critical"])
def test_the_json_of_a_call_has_its_risk_beside_the_level_of_the_line(
    capsys: pytest.CaptureFixture[str], risk: str
) -> None:
    logs.configure("json")
    with recorded("exec") as record:
        record.level = risk
    told = json.loads(capsys.readouterr().err)
    assert (told["level"], told["event"], told["risk"]) == ("INFO", "call", risk)


def test_long_values_are_cut_and_the_chatter_of_others_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("text")
    logs.event(logger, "call", call="x" * 5000)
    logging.getLogger("somebody.else").info("chatter")
    assert len(capsys.readouterr().err) < 400


_WRITER = """
import logging, os, sys, threading
from pathlib import Path
from mcp_sandbox.telemetry import logs
logs.configure("text", Path(sys.argv[1]))
logger = logging.getLogger("mcp_sandbox.test")
def write(who):
    for number in range(6000):
        logger.info("%s %d %s", who, number, "x" * 400)
threads = [threading.Thread(target=write, args=(sys.argv[2] + each,)) for each in "ab"]
for each in threads: each.start()
for each in threads: each.join()
# In one write, as each line of the log is.
os.write(2, f"{sys.argv[2]}p -1 not by the log\\n".encode())
"""


def test_a_full_log_is_followed_by_the_next_and_no_line_is_lost(tmp_path: Path) -> None:
    """Two servers write 11 MB to one file, from two threads each."""
    log = tmp_path / "daemon.log"
    with log.open("a") as first, log.open("a") as second:
        processes = [
            subprocess.Popen([sys.executable, "-c", _WRITER, log, who], stdout=file, stderr=file)
            for who, file in (("1", first), ("2", second))
        ]
    assert [process.wait(50) for process in processes] == [0, 0]
    assert sorted(os.listdir(tmp_path)) == ["daemon.log", "daemon.log.1"]
    files = [tmp_path / "daemon.log.1", log]
    full, rest = (file.stat().st_size for file in files)
    assert 8 << 20 <= full < 9 << 20
    assert 2 << 20 < rest < 4 << 20
    assert {file.stat().st_mode & 0o077 for file in files[1:]} == {0}
    found: dict[str, list[int]] = {}
    for line in "".join(file.read_text() for file in files).splitlines():
        who, number = line.rpartition("test: ")[2].split()[:2]
        found.setdefault(who, []).append(int(number))
    assert {who: sorted(numbers) for who, numbers in found.items()} == {
        **{who: [*range(6000)] for who in ("1a", "1b", "2a", "2b")},
        "1p": [-1],
        "2p": [-1],
    }


def test_a_log_that_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "daemon.log").touch()
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, tmp_path / "daemon.log", "1"],
        capture_output=True,
        check=True,
    )
    assert done.stderr.count(b"\n") == 12_001
    assert os.listdir(tmp_path) == ["daemon.log"]
