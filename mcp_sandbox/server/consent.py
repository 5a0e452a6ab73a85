"""Asks the user of a chat about one call, through clients of both eras of the protocol.

A newer client repeats the call with the answer, which the SDK has sealed to this very call and
chat; an older one is asked while the call waits. What was asked and answered is kept by the
sessions: here it is put into words.
"""

import logging
from typing import Any, Literal

from mcp.server.elicitation import AcceptedElicitation, DeclinedElicitation
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve, build_resolver_plans, resolve_arguments
from mcp.shared.exceptions import MCPError
from mcp.types import InputRequiredResult
from pydantic import BaseModel, Field

from mcp_sandbox.server.identity import Request
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.sessions.approvals import Approval, Word

logger = logging.getLogger(__name__)

WIDTH = 78
"""Clients show three lines of a question, each as far as a terminal is wide."""


class _Form(BaseModel):
    allow: Literal["this call only", "this chat"] = Field("this call only", title="Allow")


class _FormForChat(BaseModel):
    allow: Literal["this chat"] = Field("this chat", title="Allow")


class Consent:
    """Asks the user of one request; `round` is for a client that asks, and repeats the request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.round: InputRequiredResult | None = None

    async def ask(self, approval: Approval) -> Word | Literal["later"] | None:
        """Return the user's answer, or "later"; None if the client cannot ask or has no answer."""
        form = _FormForChat if approval.what == "network_access" else _Form

        async def question() -> Elicit[Any]:
            return Elicit(_words(approval), form)

        asked = {"answer": (Resolve(question), True)}
        plans = build_resolver_plans(asked, set())
        try:
            found = await resolve_arguments(asked, plans, {}, self._request)
        except (MCPError, ToolError) as exc:
            logger.info("a client did not ask its user: %s", exc)
            return None
        if isinstance(found, InputRequiredResult):
            self.round = found
            return "later"
        match found["answer"]:
            case AcceptedElicitation(data=data):
                return "chat" if data.allow == "this chat" else "once"
            case DeclinedElicitation():
                return "no"
            case _:
                return None


def _words(approval: Approval) -> str:
    """Return the effect and its target, the part that has it, and where all of it is to be seen.

    Of a long effect, such as many hosts, more is worth knowing than the part.
    """
    effect = show_name(approval.effect)
    more = f"  {effect[WIDTH:]}" if len(effect) > WIDTH else f"  {show_name(approval.part)}"
    whole = f"All of it: mcp-sandbox approvals show {approval.id}"
    return "\n".join((effect[:WIDTH], clip(more, WIDTH - 1), whole))
