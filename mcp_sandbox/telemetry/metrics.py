"""Counters and latencies of one server, in a registry of its own."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mcp_sandbox.telemetry.calls import CallRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Figures = Callable[[], dict[str, float]]
"""Gives what the sessions hold now. "name/state" is one state of several; "…_total" only grows."""


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
            if not state:
                families[name] = kind(name, text, value=value)
            else:
                family = families.setdefault(name, kind(name, text, labels=["state"]))
                family.add_sample(name, {"state": state}, value)
        yield from families.values()
