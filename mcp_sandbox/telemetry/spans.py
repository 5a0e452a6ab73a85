"""Spans on the way of a call. They cost nothing until somebody sets up an OpenTelemetry SDK."""

import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace

Value = str | int | bool

_tracer = trace.get_tracer("mcp-sandbox")
_nothing = nullcontext[trace.Span](trace.INVALID_SPAN)


def span(name: str, **attributes: Value) -> AbstractContextManager[trace.Span]:
    """Open a span beneath the current one; an error gives it its type, never its message."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _nothing
    return _opened(name, attributes)


@contextmanager
def _opened(name: str, attributes: Mapping[str, Value]) -> Generator[trace.Span]:
    with _tracer.start_as_current_span(
        name, attributes=_named(attributes), record_exception=False, set_status_on_exception=False
    ) as opened:
        try:
            yield opened
        except BaseException as exc:
            opened.set_attribute("error.type", type(exc).__qualname__)
            opened.set_status(trace.StatusCode.ERROR)
            raise


def ended_span(name: str, duration_ms: int) -> None:
    """Note what took place inside a sandbox, where nobody traces, and has just ended."""
    if not trace.get_current_span().is_recording():
        return
    end_ns = time.time_ns()
    opened = _tracer.start_span(name, start_time=end_ns - duration_ms * 1_000_000)
    opened.end(end_ns)


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"mcp_sandbox.{key}": value for key, value in attributes.items()}
