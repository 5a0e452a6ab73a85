"""How calls ended: one record of each, which the log line, the figures and the span are made from.

Records hold no contents: no arguments, no results, no messages. Spans cost nothing until a program
sets up an OpenTelemetry SDK.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import anyio
from opentelemetry import trace

from mcp_sandbox.errors import CallerError, OperatorError, SandboxError, SandboxGone
from mcp_sandbox.models import BackendName, ChatId
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

_OUTCOMES: tuple[tuple[type[Exception], str], ...] = (
    (CallerError, "caller_error"),
    (OperatorError, "operator_error"),
    (SandboxGone, "sandbox_gone"),
)


@dataclass
class CallRecord:
    """One call: what is known of it, and when it has ended how it did.

    `what` is the name of a tool, or "shell"; `call` is the id of the client's request, `client` its
    name. `level` is the grade of what it runs, `decision` what follows: allow, deny, ask or, after
    that, granted; by the `rule` of that id. `patterns` has every rule that matched. `changed` are
    the paths of changed files.
    """

    what: str
    call: str | None = None
    client: str | None = None
    chat: ChatId | None = None
    backend: BackendName | None = None
    sandbox: str | None = None
    exit_code: int | None = None
    output_bytes: int | None = None
    changed: Sequence[str] | None = None
    level: str | None = None
    decision: str | None = None
    rule: str | None = None
    patterns: Sequence[Mapping[str, str]] = ()
    outcome: str = ""
    duration_ms: float = 0.0


Count = Callable[[CallRecord], None]
Value = str | int | float | bool

_tracer = trace.get_tracer("mcp-sandbox")
_nothing = nullcontext[trace.Span](trace.INVALID_SPAN)
# The record of a client's request, until the call that it makes fills it in.
_request: ContextVar[CallRecord | None] = ContextVar("request", default=None)


@contextmanager
def recorded(
    what: str, count: Count | None = None, *, call: str | None = None
) -> Generator[CallRecord]:
    """Record how the body ends. Errors pass through.

    With `call`, a client's request, the next block inside fills in the same record: so each call
    is told of once.
    """
    request = _request.get()
    record = request or CallRecord(what, call)
    before = _request.set(record if call else None)
    try:
        with nullcontext() if request else _timed(record, count):
            yield record
    finally:
        _request.reset(before)


@contextmanager
def _timed(record: CallRecord, count: Count | None) -> Generator[None]:
    with span("call") as opened:
        started, record.outcome = time.perf_counter(), "fault"
        try:
            yield
            # Its client asks, and repeats it with the answer.
            record.outcome = "asked" if record.decision == "ask" else "ok"
        except anyio.get_cancelled_exc_class():
            record.outcome = "cancelled"
            raise
        except SandboxError as exc:
            kinds = (outcome for kind, outcome in _OUTCOMES if isinstance(exc, kind))
            record.outcome = next(kinds, "fault")
            raise
        finally:
            record.duration_ms = round(1000 * (time.perf_counter() - started), 1)
            if count is not None:
                count(record)
            given: dict[str, Value | None] = {
                "chat": str(record.chat) if record.chat else None,
                "call": record.call,
                "tool": record.what,
                "backend": record.backend,
                "duration_ms": record.duration_ms,
                "outcome": record.outcome,
                "exit_code": record.exit_code,
                "risk": record.level,
                "decision": record.decision,
                "rule": record.rule,
            }
            event(logger, "call", **given)
            opened.set_attributes(_named({k: v for k, v in given.items() if v is not None}))


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
    """Note what took place inside a sandbox, which is not traced, and has just ended."""
    if not trace.get_current_span().is_recording():
        return
    end_ns = time.time_ns()
    _tracer.start_span(name, start_time=end_ns - duration_ms * 1_000_000).end(end_ns)


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"mcp_sandbox.{key}": value for key, value in attributes.items()}
