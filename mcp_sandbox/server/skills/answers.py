"""Which of the protocol's requests are answered by what, where skills are offered."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from mcp.server.context import HandlerResult
from mcp.types import (
    CompleteRequestParams,
    GetPromptRequestParams,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    RequestParams,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    UnsubscribeRequestParams,
)

from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.skills.changes import SkillChanges
from mcp_sandbox.server.skills.completion import SkillCompletion
from mcp_sandbox.server.skills.prompts import SkillPrompts
from mcp_sandbox.server.skills.resources import SkillResources
from mcp_sandbox.server.skills.visible import Visible


class Answer(NamedTuple):
    """Answers the requests of one method."""

    method: str
    params: type[RequestParams]
    answer: Callable[..., Awaitable[HandlerResult]]


def answers(visible: Visible, session_for: SessionFor, changes: SkillChanges) -> Sequence[Answer]:
    """All of them; the SDK's own would know nothing of whose request it is."""
    resources, prompts = SkillResources(visible), SkillPrompts(visible, session_for)
    return (
        Answer("resources/list", PaginatedRequestParams, resources.list),
        Answer("resources/templates/list", PaginatedRequestParams, resources.templates),
        Answer("resources/read", ReadResourceRequestParams, resources.read),
        Answer("resources/subscribe", SubscribeRequestParams, changes.subscribe),
        Answer("resources/unsubscribe", UnsubscribeRequestParams, changes.unsubscribe),
        Answer("subscriptions/listen", SubscriptionsListenRequestParams, changes.listen),
        Answer("prompts/list", PaginatedRequestParams, prompts.list),
        Answer("prompts/get", GetPromptRequestParams, prompts.get),
        Answer("completion/complete", CompleteRequestParams, SkillCompletion(visible).complete),
    )
