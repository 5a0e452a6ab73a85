"""The files by which shells remember, put into place beside each other."""

import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcp_sandbox.runner.calls.shell import SAVE, saver
from mcp_sandbox.runner.workers.worker import recall


@pytest.fixture
def turns() -> Generator[None]:
    """Threads take turns as often as workers, which are processes, get in each other's way."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("turns")
def test_shells_that_begin_at_once_do_not_refuse_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for number in range(100):
            memories = [str(tmp_path / str(number) / f"{name}.sh") for name in range(8)]
            assert list(threads.map(recall, memories)) == [["new"]] * 8
            assert Path(saver(memories[0])).read_bytes() == SAVE
