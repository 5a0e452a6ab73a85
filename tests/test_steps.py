"""What fails a test in which a step of an event loop takes too long, on planted steps."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.daemon.running import in_chat, place, running

_PROGRAM = """
import anyio, asyncio, gc, sys, threading, time
from tests import steps

async def compute():
    end = time.thread_time() + 0.3
    while time.thread_time() < end: pass
async def wait(): time.sleep(0.3)
async def load():
    import wave
    await compute()
async def beside():
    inside, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=collect, args=(inside, go_on))
    thread.start()
    inside.wait()
    await asyncio.sleep(0)
    go_on.set()
    thread.join()
def collect(inside, go_on):
    end = time.thread_time() + 0.3
    while time.thread_time() < end: pass
    class Slow:
        def __del__(self):
            inside.set()
            go_on.wait()
    circle = Slow()
    circle.own = circle
    del circle
    gc.collect()
async def main(): await asyncio.create_task(globals()[sys.argv[1]]())

steps.watch(sys.stdout.write)
if sys.argv[1] == "own":
    anyio.run(compute)
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("what", "noted"),
    [("compute", True), ("wait", False), ("load", False), ("own", False), ("beside", False)],
)
def test_a_step_is_noted_by_its_own_processor_time(what: str, noted: bool) -> None:
    program = [sys.executable, "-c", _PROGRAM, what]
    root = Path(__file__).parents[1]
    said = subprocess.run(program, cwd=root, capture_output=True, check=True, text=True).stdout
    assert bool(said) == ("compute" in said) == noted, said


async def test_a_long_step_of_a_daemon_is_noted(
    tmp_path: Path, long_steps: Callable[[], str]
) -> None:
    where = replace(place(tmp_path), module="tests.daemon.blocking")
    async with running(where) as daemon, in_chat(where, "waits") as client:
        await client.exec("true")
        assert long_steps() == ""
        daemon.process.send_signal(signal.SIGUSR2)
        await client.exec("true")
    assert "ms in a step of" in (said := long_steps())
    assert "compute" in said
