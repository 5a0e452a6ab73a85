"""How clients learn that skills changed: each hears of its own catalogue only.

Newer clients ask for it (`subscriptions/listen`); older ones are told after their handshake, and
of single resources if they subscribed. Nothing watches for a client that has gone.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult
from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_REQUEST,
    EmptyResult,
    NotificationParams,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    UnsubscribeRequestParams,
)

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.server.errors import protocol_errors, sole_error
from mcp_sandbox.server.skills.events import Follower, follow
from mcp_sandbox.server.skills.visible import Asked, Visible, canonical

logger = logging.getLogger(__name__)

_TASKS = "mcp_sandbox.tasks"
_MOST_SUBSCRIBED = 1000
_KEY = "mcp_sandbox.skills"


@dataclass
class _Older:
    """What is known of a connection of the older protocol: the resources that it subscribed."""

    begun: bool = False
    subscribed: set[str] = field(default_factory=set[str])


@asynccontextmanager
async def with_tasks(_server: object) -> AsyncGenerator[dict[str, Any]]:
    """The lifespan of a server that tells clients of changes while no request of theirs runs."""
    with sole_error():
        async with anyio.create_task_group() as tasks:
            yield {_TASKS: tasks}
            tasks.cancel_scope.cancel()


async def declared(ctx: Asked, call_next: CallNext) -> HandlerResult:
    """Let clients of the older protocol know that they will be told; newer ones ask for it."""
    result = await call_next(ctx)
    if ctx.method == "initialize" and isinstance(result, dict):
        capabilities = result["capabilities"]
        for kind in ("prompts", "resources", "tools"):
            capabilities[kind] = {**capabilities.get(kind, {}), "listChanged": True}
    return result


class SkillChanges:
    """Tells clients of changes for as long as they are there."""

    def __init__(self, visible: Visible) -> None:
        self._visible = visible

    @protocol_errors
    async def listen(
        self, asked: Asked, params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        """Serve a newer client's stream of changes until it goes."""
        uris = frozenset(params.notifications.resource_subscriptions or ())
        if len(uris) > _MOST_SUBSCRIBED:
            raise _too_many()
        bus = InMemorySubscriptionBus()
        follower = Follower(self._visible.whose(asked), lambda: uris, bus.publish)
        async with anyio.create_task_group() as tasks:
            await tasks.start(follow, self._visible, follower)
            result = await ListenHandler(bus)(asked, params)
            tasks.cancel_scope.cancel()
        return result

    async def begin(self, asked: Asked, _params: NotificationParams) -> None:
        """Tell an older client of changes from now on, until its connection ends."""
        connection, older = _connection(asked), _older(asked)
        if not older.begun:
            older.begun = True
            scope = anyio.CancelScope()
            connection.exit_stack.callback(scope.cancel)
            tell = partial(_tell, asked.session)
            follower = Follower(self._visible.whose(asked), lambda: older.subscribed, tell)
            asked.lifespan_context[_TASKS].start_soon(self._follow, follower, scope)

    @protocol_errors
    async def subscribe(self, asked: Asked, params: SubscribeRequestParams) -> EmptyResult:
        """Tell an older client of changes of this resource too."""
        subscribed = _older(asked).subscribed
        if len(subscribed) >= _MOST_SUBSCRIBED:
            raise _too_many()
        subscribed.add(canonical(params.uri))
        return EmptyResult()

    @protocol_errors
    async def unsubscribe(self, asked: Asked, params: UnsubscribeRequestParams) -> EmptyResult:
        """Tell an older client of this resource no more."""
        _older(asked).subscribed.discard(canonical(params.uri))
        return EmptyResult()

    async def _follow(self, follower: Follower, until: anyio.CancelScope) -> None:
        try:
            with until:
                await follow(self._visible, follower)
        except (SandboxError, OSError):
            # It runs beside all that is served, which must not end with it.
            logger.exception("%s is told of no more changes of skills", follower.whose)


async def _tell(session: ServerSession, event: ServerEvent) -> None:
    if isinstance(event, ToolsListChanged):
        await session.send_tool_list_changed()
    elif isinstance(event, PromptsListChanged):
        await session.send_prompt_list_changed()
    elif isinstance(event, ResourcesListChanged):
        await session.send_resource_list_changed()
    else:
        await session.send_resource_updated(event.uri)


def _too_many() -> MCPError:
    problem = f"at most {_MOST_SUBSCRIBED:,} resources can be subscribed"
    return MCPError(code=INVALID_REQUEST, message=problem)


def _older(asked: Asked) -> _Older:
    found: _Older = _connection(asked).state.setdefault(_KEY, _Older())
    return found


def _connection(asked: Asked) -> Connection:
    # The SDK has no other way to what a connection keeps and undoes at its end.
    return asked.session._connection  # noqa: SLF001
