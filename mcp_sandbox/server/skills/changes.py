"""How clients learn that skills changed: each hears of its own catalogue only.

Newer clients ask for it (`subscriptions/listen`); older ones are told after their handshake, and
of single resources if they subscribed. Nothing watches for a client that has gone.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskStatus
from mcp import types
from mcp.server import subscriptions
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError

from mcp_sandbox.errors import CallerError, SandboxError
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.skills.visible import Asked, VisibleSkills, canonicalize
from mcp_sandbox.skills.scan import Whose

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_MOST_SUBSCRIBED = 1000
_TASKS = "mcp_sandbox.tasks"
# What is known of a connection of the older protocol.
_FOLLOWS = "mcp_sandbox.follows"
_SUBSCRIBED = "mcp_sandbox.subscribed"


@dataclass(frozen=True)
class Follower:
    """A client that wants to hear of changes: of which resources, and how."""

    visible: VisibleSkills
    whose: Whose
    uris: Set[str]
    tell: Callable[[subscriptions.ServerEvent], Awaitable[None]]

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Tell of every change from the moment that this has started; it never returns."""
        library = self.visible.library
        async with library.changes(self.whose) as changes, anyio.create_task_group() as tasks:
            had = await self.visible.has_tools(self.whose)
            await tasks.start(self._follow_files)
            task_status.started()
            async for changed in changes:
                has = await self.visible.has_tools(self.whose)
                if has != had:
                    await self.tell(subscriptions.ToolsListChanged())
                had = has
                await self.tell(subscriptions.PromptsListChanged())
                await self.tell(subscriptions.ResourcesListChanged())
                for uri in sorted(changed & self.uris):
                    await self.tell(subscriptions.ResourceUpdated(uri=uri))

    async def _follow_files(self, *, task_status: TaskStatus[None]) -> None:
        before = await self._digests()
        task_status.started()
        while True:
            await anyio.sleep(_LOOK_S)
            now = await self._digests()
            for uri in sorted(before.keys() & now.keys()):
                if before[uri] != now[uri]:
                    await self.tell(subscriptions.ResourceUpdated(uri=uri))
            before = now

    async def _digests(self) -> Mapping[str, str | None]:
        """Return a mark of the content of each wanted file that is no skill's document."""
        found: dict[str, str | None] = {}
        if not self.uris:
            return found
        catalogue = await self.visible.library.catalogue(self.whose, max_age_s=_LOOK_S)
        for uri in self.uris - catalogue.by_uri.keys():
            # Without a digest it is gone, or just being written.
            found[uri] = None
            with suppress(CallerError):
                found[uri] = (await self.visible.file(catalogue, uri))[1].digest
        return found


@asynccontextmanager
async def with_tasks(_server: object) -> AsyncGenerator[dict[str, Any]]:
    """Run beside the server, and tell clients of changes while no request of theirs runs."""
    with sole_error():
        async with anyio.create_task_group() as tasks:
            yield {_TASKS: tasks}
            tasks.cancel_scope.cancel()


class SkillChanges:
    """Tells clients of changes for as long as they are there."""

    def __init__(self, visible: VisibleSkills) -> None:
        self._visible = visible

    async def listen(
        self, asked: Asked, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve a newer client's stream of changes until it goes."""
        uris = frozenset(params.notifications.resource_subscriptions or ())
        if len(uris) > _MOST_SUBSCRIBED:
            raise _too_many()
        bus = subscriptions.InMemorySubscriptionBus()
        follower = Follower(self._visible, self._visible.find_owner(asked), uris, bus.publish)
        async with anyio.create_task_group() as tasks:
            await tasks.start(follower.follow)
            result = await subscriptions.ListenHandler(bus)(asked, params)
            tasks.cancel_scope.cancel()
        return result

    async def begin(self, asked: Asked, _params: types.NotificationParams) -> None:
        """Tell an older client of changes from now on, until its connection ends."""
        # The SDK has no other way to what a connection keeps and undoes at its end.
        connection = asked.session._connection  # noqa: SLF001
        if _FOLLOWS not in connection.state:
            connection.state[_FOLLOWS] = True
            scope = anyio.CancelScope()
            connection.exit_stack.callback(scope.cancel)
            tell, whose = partial(_tell, asked.session), self._visible.find_owner(asked)
            follower = Follower(self._visible, whose, _subscriptions_of(asked), tell)
            asked.lifespan_context[_TASKS].start_soon(_follow, follower, scope)

    async def subscribe(
        self, asked: Asked, params: types.SubscribeRequestParams
    ) -> types.EmptyResult:
        subscribed = _subscriptions_of(asked)
        if len(subscribed) >= _MOST_SUBSCRIBED:
            raise _too_many()
        subscribed.add(canonicalize(params.uri))
        return types.EmptyResult()

    async def unsubscribe(
        self, asked: Asked, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        _subscriptions_of(asked).discard(canonicalize(params.uri))
        return types.EmptyResult()


async def _follow(follower: Follower, until: anyio.CancelScope) -> None:
    try:
        with until:
            await follower.follow()
    except (SandboxError, OSError):
        # It runs beside all that is served, which must not end with it.
        logger.exception("%s is told of no more changes of skills", follower.whose)


async def _tell(session: ServerSession, event: subscriptions.ServerEvent) -> None:
    if isinstance(event, subscriptions.ToolsListChanged):
        await session.send_tool_list_changed()
    elif isinstance(event, subscriptions.PromptsListChanged):
        await session.send_prompt_list_changed()
    elif isinstance(event, subscriptions.ResourcesListChanged):
        await session.send_resource_list_changed()
    else:
        await session.send_resource_updated(event.uri)


def _too_many() -> MCPError:
    problem = f"at most {_MOST_SUBSCRIBED:,} resources can be subscribed"
    return MCPError(code=types.INVALID_REQUEST, message=problem)


def _subscriptions_of(asked: Asked) -> set[str]:
    state = asked.session._connection.state  # noqa: SLF001
    found: set[str] = state.setdefault(_SUBSCRIBED, set[str]())
    return found
