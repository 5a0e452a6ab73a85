"""Tells the operator of every tool call: whose it was, how long it took and how it ended."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import anyio
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError

from mcp_sandbox.errors import CallerError, OperatorError, SandboxGone
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.identity import Request
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

_OUTCOMES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    ((CallerError, ToolError, MCPError), "caller_error"),
    (OperatorError, "operator_error"),
    (SandboxGone, "sandbox_gone"),
)


class CallCounter(Protocol):
    """Keeps count of calls that have ended."""

    def count_call(self, tool: str, outcome: str, seconds: float) -> None: ...


class Observation:
    """One call under way; the session is known once its arguments are checked."""

    def __init__(self) -> None:
        self.session: Session | None = None


class Observer:
    """Writes a line and counts, once for each call. It learns no arguments and no results."""

    def __init__(self, counter: CallCounter | None = None) -> None:
        self._counter = counter

    @contextmanager
    def call(self, tool: str, request: Request) -> Generator[Observation]:
        """Observe the body; its errors pass through, unwrapped from task groups."""
        seen, started, outcome = Observation(), time.perf_counter(), "fault"
        try:
            with sole_error():
                yield seen
            outcome = "ok"
        except anyio.get_cancelled_exc_class():
            outcome = "cancelled"
            raise
        except Exception as exc:
            outcome = _outcome(exc)
            raise
        finally:
            self._tell(tool, request, seen.session, outcome, time.perf_counter() - started)

    def _tell(
        self, tool: str, request: Request, session: Session | None, outcome: str, seconds: float
    ) -> None:
        if self._counter is not None:
            self._counter.count_call(tool, outcome, seconds)
        event(
            logger,
            "call",
            chat=str(session.chat) if session else None,
            call=str(request.request_id),
            tool=tool,
            backend=session.backend if session else None,
            duration_ms=round(seconds * 1000, 1),
            outcome=outcome,
        )


def _outcome(error: Exception) -> str:
    return next((name for kinds, name in _OUTCOMES if isinstance(error, kinds)), "fault")
