"""What came, changed and went below a folder, as a worker sees it."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.runner.workers import worker
from mcp_sandbox.runner.workers.worker import SeenNames


@pytest.fixture(autouse=True)
def _however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BUDGET_S", 60.0)


def a_tick_later() -> None:
    """Wait until the clock that stamps files has passed this moment."""
    now_ns = time.time_ns()
    while time.clock_gettime_ns(5) <= now_ns:
        time.sleep(0.001)


def ended(top: Path, names: SeenNames) -> tuple[Any, Any, Any]:
    """The paths, by index which of them are new, and the counts."""
    told = names.end(str(top))
    return told["changed"], told["created"], told["counts"]


def begun(top: Path, names: SeenNames | None = None) -> SeenNames:
    names = names or SeenNames()
    a_tick_later()
    names.begin(str(top))
    return names


def test_what_comes_changes_and_goes_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("kept", "edited", "replaced", "moved", "sub/inner"):
        (tmp_path / name).write_text("1")
    names = begun(tmp_path)
    (tmp_path / "edited").write_text("2")
    (tmp_path / "other").write_text("2")
    os.replace(tmp_path / "other", tmp_path / "replaced")
    os.rename(tmp_path / "moved", tmp_path / "here")
    os.rename(tmp_path / "sub", tmp_path / "dir")
    assert ended(tmp_path, names) == (["edited", "here", "replaced"], [1], [2, 2, 2])


def test_what_others_did_before_a_command_is_not_its_doing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/old").write_text("1")
    names = begun(tmp_path)
    names.end(str(tmp_path))
    (tmp_path / "sub/old").unlink()
    (tmp_path / "sub/tool").write_text("1")
    begun(tmp_path, names)
    (tmp_path / "sub/tool").write_text("2")
    assert ended(tmp_path, names) == (["sub/tool"], [], [0, 1, 0])


def test_a_name_that_comes_within_the_same_tick_is_seen(tmp_path: Path) -> None:
    names = SeenNames()
    for number in range(50):
        names.begin(str(tmp_path))
        (tmp_path / str(number)).write_text("1")
        counts = ended(tmp_path, names)[2]
        assert counts is not None
        assert counts[::2] == [1, 0]


def test_numbers_in_names_are_sorted_by_their_value(tmp_path: Path) -> None:
    names = begun(tmp_path)
    for name in ("a10", "a9", "b", "10", "9", "a9b", "²", "x" * 200):
        (tmp_path / name).write_text("1")
    assert ended(tmp_path, names)[0] == ["9", "10", "a9", "a9b", "a10", "b", "x" * 200, "²"]


def test_too_much_to_see_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    names = begun(tmp_path)
    with monkeypatch.context() as hurried:
        hurried.setattr(worker, "_BUDGET_S", -1)
        assert ended(tmp_path, names) == (None, None, None)
    begun(tmp_path, names)
    (tmp_path / "f").write_text("1")
    assert ended(tmp_path, names) == (["f"], None, None)
    begun(tmp_path, names)
    (tmp_path / "f").unlink()
    assert ended(tmp_path, names) == ([], [], [0, 0, 1])


def test_what_is_gone_altogether_is_not_known(tmp_path: Path) -> None:
    names = begun(tmp_path)
    assert ended(tmp_path / "absent", names) == (None, None, None)
