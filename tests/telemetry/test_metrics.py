"""What Prometheus and people read of a server's work."""

import os
import re
import signal
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcp_sandbox.telemetry.calls import CallRecord
from mcp_sandbox.telemetry.metrics import Metrics, ToolFigures


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text = metrics.text().decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def ended(outcome: str, duration_ms: float) -> CallRecord:
    return CallRecord("exec", outcome=outcome, duration_ms=duration_ms)


def test_calls_are_counted_by_tool_and_outcome() -> None:
    metrics = Metrics()
    metrics.count(ended("ok", 100))
    metrics.count(ended("ok", 200))
    metrics.count(ended("sandbox_gone", 3000))
    read = samples(metrics)
    assert read["mcp_sandbox_calls_total", "ok", "exec"] == 2
    assert read["mcp_sandbox_calls_total", "sandbox_gone", "exec"] == 1
    assert read["mcp_sandbox_call_seconds_bucket", "0.25", "exec"] == 2
    assert read["mcp_sandbox_call_seconds_count", "exec"] == 3
    assert metrics.snapshot() == [ToolFigures("exec", 3, 1, 1100.0)]


def test_figures_of_others_are_asked_at_each_reading() -> None:
    metrics = Metrics()
    figures = {"sandboxes/busy": 1.0, "sandboxes/idle": 2.0, "calls_queued": 0.0}
    more = {"pool_hits_total": 4.0, "connections_total/rule": 2.0}
    metrics.watch(lambda: figures | more)
    assert samples(metrics) == {
        ("mcp_sandbox_loop_blocked_total",): 0,
        ("mcp_sandbox_sandboxes", "busy"): 1,
        ("mcp_sandbox_sandboxes", "idle"): 2,
        ("mcp_sandbox_calls_queued",): 0,
        ("mcp_sandbox_pool_hits_total",): 4,
        ("mcp_sandbox_connections_total", "rule"): 2,
    }
    figures["calls_queued"] = 5.0
    assert samples(metrics)["mcp_sandbox_calls_queued",] == 5


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.count(ended("ok", 100))
    assert second.snapshot() == []


_LOOPS = """
import asyncio, logging, os, re, signal, subprocess, sys, time
from mcp_sandbox.telemetry.metrics import Metrics

def wait(): time.sleep(1.2)
def compute(): sum(range(60_000_000))
def match(): re.fullmatch("(a|aa)+b", "a" * 38)
def work():
    end = time.monotonic() + 1.2
    while time.monotonic() < end: pass
def stop(): os.kill(os.getpid(), signal.SIGSTOP)
async def busy():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        short = time.monotonic() + 0.01
        while time.monotonic() < short: pass
        await asyncio.sleep(0)

async def main(metrics):
    metrics.watch_loop()
    await asyncio.sleep(0.3)
    what = globals()[sys.argv[1]]
    await what() if asyncio.iscoroutinefunction(what) else what()
    await asyncio.sleep(0.6)

logging.basicConfig(format="%(message)s %(where)s")
metrics = Metrics()
asyncio.run(main(metrics))
print(metrics.loop_blocked)
"""


def watched(what: str) -> tuple[int, str]:
    """How often the loop of a program that does this was blocked, and what the log said."""
    with subprocess.Popen(
        [sys.executable, "-c", _LOOPS, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as loop:
        if what == "stop":
            os.waitid(os.P_PID, loop.pid, os.WSTOPPED)
            # It has to be stopped for longer than what counts as a block.
            with pytest.raises(subprocess.TimeoutExpired):
                loop.wait(1.5)
            loop.send_signal(signal.SIGCONT)
        out, err = loop.communicate(timeout=40)
    return int(out), err


@pytest.mark.parametrize("what", ["wait", "compute", "match", "work"])
def test_what_blocks_the_loop_is_counted_once_and_logged_with_its_place(what: str) -> None:
    count, said = watched(what)
    assert count == 1
    assert re.fullmatch(
        rf"the event loop is blocked .*\b__main__\.{what}:\d+ < __main__\.main:\d+ < .*\n", said
    )


@pytest.mark.parametrize("what", ["busy", "stop"])
def test_neither_many_short_steps_nor_a_stopped_process_are_a_block(what: str) -> None:
    assert watched(what) == (0, "")
