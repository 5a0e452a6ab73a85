"""What Prometheus and people read of a server's work."""

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
