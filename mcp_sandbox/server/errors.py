"""Our errors as text that a model can act on."""

import functools
import logging
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR, INVALID_PARAMS

from mcp_sandbox import errors
from mcp_sandbox.server.text import shorten, show

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 8_000
_PASSES = "Call again in a moment; if it stays so, tell the user."
_TODO: tuple[tuple[type[errors.SandboxError], str], ...] = (
    (
        errors.CutOff,
        "Nothing was repeated: look at what this call had already done, then call again. The next "
        "call gets the same sandbox, with its files, processes and /tmp.",
    ),
    (
        errors.SandboxGone,
        "The sandbox ended during this call and nothing was repeated: look at what the call had "
        "already done, then call again. The next call gets a new sandbox on the same files; "
        "processes and /tmp are gone.",
    ),
    (errors.CapacityReached, "Try again later, or tell the user that the sandbox server is full."),
    (errors.ChatElsewhere, _PASSES),
    (errors.Unreachable, f"Its files and what runs in it are left as they are. {_PASSES}"),
    (
        errors.OperatorError,
        "A person must fix this on the machine of the sandbox server; other arguments will not "
        "help. Tell the user.",
    ),
)


@contextmanager
def readable_errors() -> Generator[None]:
    """Let every failure inside reach the model as text; cancellation passes through.

    Raises:
        ToolError: with text that says what happened and what to do next.
        MCPError: unchanged; it is meant for the client, not the model.
    """
    try:
        yield
    except (ToolError, MCPError):
        raise
    except errors.SandboxError as exc:
        raise ToolError(text_for_model(exc)) from exc
    except Exception as exc:
        logger.exception("a tool call failed unexpectedly")
        raise ToolError(
            f"The sandbox server itself failed ({type(exc).__name__}); details are in its log. "
            "It is unknown how far the call came: look before you repeat it. "
            "If it happens again, tell the user."
        ) from exc


def protocol_errors(
    answer: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let each of our errors in a request that is no tool call reach the client.

    Raises MCPError: "invalid params" for what the caller can mend, else "internal error".
    """

    @functools.wraps(answer)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with sole_error():
                return await answer(*args, **kwargs)
        except errors.SandboxError as exc:
            code = INVALID_PARAMS if isinstance(exc, errors.CallerError) else INTERNAL_ERROR
            raise MCPError(code=code, message=text_for_model(exc)) from exc

    return answered


def text_for_model(error: errors.SandboxError) -> str:
    """Return what happened, and what to do next."""
    message = shorten(show(str(error) or type(error).__doc__ or ""), _MAX_MESSAGE_BYTES)
    text = f"{message.head}…{message.tail}" if message.left_out else message.head
    todo = next((words for kind, words in _TODO if isinstance(error, kind)), "")
    return f"{text}\n{todo}" if todo else text


@contextmanager
def sole_error() -> Generator[None]:
    """Raise what a task group wrapped, when that is a single error."""
    try:
        yield
    except ExceptionGroup as group:
        inner: Exception = group
        while isinstance(inner, ExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if inner is group:
            raise
        raise inner from inner.__cause__
