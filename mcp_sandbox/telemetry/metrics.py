"""Counters and latencies of one server, in a registry of its own; a watch of its event loop."""

import logging
import sys
import threading
import time
from asyncio import Handle  # noqa: TID251 - not to run in it, but to know it
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from traceback import walk_stack

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mcp_sandbox.telemetry.calls import CallRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Figures = Callable[[], dict[str, float]]
"""Gives what the sessions hold now. "name/state" is one state of several; "…_total" only grows."""

_LOOK_S, _BLOCKED_S = 0.25, 0.5
_STEP = Handle._run.__code__  # noqa: SLF001 - asyncio runs each step in a frame of it


@dataclass(frozen=True)
class ToolFigures:
    """The calls of one tool since the server started; `failed` are those without a result."""

    tool: str
    calls: int
    failed: int
    mean_ms: float


class Metrics:
    """What one server has done. Cheap to count; read by `/metrics` and `status`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "mcp_sandbox_calls",
            "Tool calls by how they ended",
            ["tool", "outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "mcp_sandbox_call_seconds",
            "Time from a tool call to its answer",
            ["tool"],
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
            registry=self.registry,
        )
        self.loop_blocked = 0
        self.watch(lambda: {"loop_blocked_total": self.loop_blocked})

    def watch_loop(self) -> None:
        """Count and log from now on, by a thread, what blocks the event loop of this thread."""
        threading.Thread(target=self._note, args=[threading.get_ident()], daemon=True).start()

    def _note(self, thread: int) -> None:
        for where in _blocks(thread):
            self.loop_blocked += 1
            logging.getLogger(__name__).warning("the event loop is blocked", extra={"where": where})

    def count(self, record: CallRecord) -> None:
        if record.outcome == "asked":
            # The call is the next round, with the answer.
            return
        self._calls.labels(record.what, record.outcome).inc()
        self._seconds.labels(record.what).observe(record.duration_ms / 1000)

    def watch(self, figures: Figures) -> None:
        """Show these figures too, asked anew at each reading; once per server."""
        self.registry.register(_Others(figures))

    def text(self) -> bytes:
        """Return what Prometheus reads; its type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    def snapshot(self) -> list[ToolFigures]:
        """Return the calls by tool, for people."""
        calls, failed, seconds = (defaultdict[str, float](float) for _ in range(3))
        for sample in (each for metric in self.registry.collect() for each in metric.samples):
            tool = sample.labels.get("tool", "")
            if sample.name == "mcp_sandbox_calls_total":
                calls[tool] += sample.value
                failed[tool] += sample.value * (sample.labels["outcome"] != "ok")
            elif sample.name == "mcp_sandbox_call_seconds_sum":
                seconds[tool] += sample.value
        return [
            ToolFigures(tool, int(n), int(failed[tool]), 1000 * seconds[tool] / n)
            for tool, n in sorted(calls.items())
        ]


def _blocks(thread: int) -> Iterator[str]:
    """Yield where a thread is, innermost first, once for each step of its event loop that blocks.

    The loop is not woken. Time counts by looks, as a stopped process or machine is no block; under
    a C call, which lets no other thread look, by the thread's processor time.
    """
    clock, step, lasted_s = time.pthread_getcpuclockid(thread), None, 0.0
    used_s = time.clock_gettime(clock)
    while frame := sys._current_frames().get(thread):  # noqa: SLF001 - documented for debugging
        stack, last, ran_s = [*walk_stack(frame)], step, time.clock_gettime(clock) - used_s
        step = next((at for at, _ in stack if at.f_code is _STEP), None)
        goes_on = step is not None and step is last
        used_s, before_s = used_s + ran_s, lasted_s if goes_on else 0.0
        lasted_s = before_s + max(_LOOK_S * goes_on, ran_s if ran_s >= _BLOCKED_S else 0.0)
        if before_s < _BLOCKED_S <= lasted_s:
            names = (f"{at.f_globals['__name__']}.{at.f_code.co_name}:{n}" for at, n in stack)
            yield " < ".join([*names][:16])
        del frame, stack  # what their functions held
        time.sleep(_LOOK_S)


class _Others(Collector):
    """Figures that are kept elsewhere."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for key, value in self._figures().items():
            base, _, state = key.partition("/")
            name, text = f"mcp_sandbox_{base}", base.replace("_", " ")
            kind = CounterMetricFamily if base.endswith("_total") else GaugeMetricFamily
            labels = {"state": state} if state else {}
            families.setdefault(name, kind(name, text, labels=[*labels]))
            families[name].add_sample(name, labels, value)
        yield from families.values()
