"""Asks the user of a chat about one call, through clients of both eras of the protocol.

A newer client repeats the call with the answer, which the SDK has sealed to this very call and
chat; an older one is asked while the call waits. What was asked and answered is kept by the
sessions: here it is put into words.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from mcp.server.elicitation import (
    AcceptedElicitation,
    CancelledElicitation,
    DeclinedElicitation,
)
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import (
    Elicit,
    Resolve,
    build_resolver_plans,
    resolve_arguments,
)
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, InputRequiredResult
from pydantic import BaseModel, Field

from mcp_sandbox.errors import ConsentNeeded
from mcp_sandbox.server.identity import Request
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.sessions.approvals import Approval, Question, Word

logger = logging.getLogger(__name__)

WIDTH = 78
"""Clients show three lines of a question, each as far as a terminal is wide."""

_Answered = AcceptedElicitation[Any] | DeclinedElicitation | CancelledElicitation


class _Form(BaseModel):
    allow: Literal["this call only", "this chat"] = Field("this call only", title="Allow")


class _FormForChat(BaseModel):
    allow: Literal["this chat"] = Field("this chat", title="Allow")


async def consented(
    call: Callable[[], Awaitable[CallToolResult]], request: Request
) -> CallToolResult | InputRequiredResult:
    """Make a call, once its chat's user has agreed where that is needed.

    An InputRequiredResult is for the client, which asks them and repeats the call.

    Raises:
        ConsentNeeded: nobody has answered; the question is kept.
        NotPermitted: they have said no.
        Busy: they are being asked about another call.
    """
    try:
        return await call()
    except ConsentNeeded as exc:
        needed, question = exc, exc.question
        assert isinstance(question, Question)  # noqa: S101
    question.begin()
    waits = False
    try:
        answered = await _ask(question.approval, request)
        waits = isinstance(answered, InputRequiredResult)
    finally:
        question.end(waits=waits)
    if isinstance(answered, InputRequiredResult):
        return answered
    if isinstance(answered, CancelledElicitation):
        raise needed
    word: Word = "no"
    if isinstance(answered, AcceptedElicitation):
        word = "chat" if answered.data.allow == "this chat" else "once"
    await question.answer(word)
    return await call()


async def _ask(approval: Approval, request: Request) -> _Answered | InputRequiredResult:
    """What the user says; a client that cannot ask, or says what was not offered, says nothing."""
    form = _FormForChat if approval.what == "network_access" else _Form

    async def question() -> Elicit[Any]:
        return Elicit(_words(approval), form)

    asked = {"answer": (Resolve(question), True)}
    try:
        found = await resolve_arguments(asked, build_resolver_plans(asked, set()), {}, request)
    except (MCPError, ToolError) as exc:
        logger.info("a client did not ask its user: %s", exc)
        return CancelledElicitation()
    return found if isinstance(found, InputRequiredResult) else found["answer"]


def _words(approval: Approval) -> str:
    """The effect and its target, the part that has it, and where all of it is to be seen.

    Of a long effect, such as many hosts, more is worth knowing than the part.
    """
    effect = show_name(approval.effect)
    more = f"  {effect[WIDTH:]}" if len(effect) > WIDTH else f"  {show_name(approval.part)}"
    whole = f"All of it: mcp-sandbox approvals show {approval.id}"
    return "\n".join((effect[:WIDTH], clip(more, WIDTH - 1), whole))
