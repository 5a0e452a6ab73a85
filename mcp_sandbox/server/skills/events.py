"""What of a caller's skills changes, in the protocol's events.

The library tells when skills come, go or are edited. Their other files are looked at here, and
only those that somebody wants to hear about.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from dataclasses import dataclass

import anyio
from anyio.abc import TaskStatus
from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)

from mcp_sandbox.errors import CallerError
from mcp_sandbox.server.skills.visible import Visible
from mcp_sandbox.skills.models import Change
from mcp_sandbox.skills.roots import Whose

Tell = Callable[[ServerEvent], Awaitable[None]]
_LOOK_S = 2.0


@dataclass(frozen=True)
class Follower:
    """Somebody who wants to hear of changes: of which resources, and how."""

    whose: Whose
    uris: Callable[[], Set[str]]
    tell: Tell


async def follow(
    visible: Visible,
    follower: Follower,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Tell of every change from the moment that this has started; it never returns."""
    async with (
        visible.library.changes(follower.whose) as changes,
        anyio.create_task_group() as tasks,
    ):
        had = await visible.has_tools(follower.whose)
        await tasks.start(_files, visible, follower)
        task_status.started()
        await _skills(visible, follower, changes, had=had)


async def _skills(
    visible: Visible, follower: Follower, changes: AsyncIterator[Change], *, had: bool
) -> None:
    async for change in changes:
        has = await visible.has_tools(follower.whose)
        if has != had:
            await follower.tell(ToolsListChanged())
        had = has
        await follower.tell(PromptsListChanged())
        await follower.tell(ResourcesListChanged())
        for uri in sorted(change.uris & follower.uris()):
            await follower.tell(ResourceUpdated(uri=uri))


async def _files(visible: Visible, follower: Follower, *, task_status: TaskStatus[None]) -> None:
    before = await _digests(visible, follower)
    task_status.started()
    while True:
        await anyio.sleep(_LOOK_S)
        now = await _digests(visible, follower)
        for uri in sorted(before.keys() & now.keys()):
            if before[uri] != now[uri]:
                await follower.tell(ResourceUpdated(uri=uri))
        before = now


async def _digests(visible: Visible, follower: Follower) -> Mapping[str, str | None]:
    """Of each wanted file that is no skill's document: what tells its content from another."""
    uris = follower.uris()
    if not uris:
        return {}
    catalogue = await visible.library.catalogue(follower.whose, max_age_s=_LOOK_S)
    found: dict[str, str | None] = {}
    for uri in uris - catalogue.by_uri.keys():
        try:
            _, file = await visible.file(catalogue, uri)
            found[uri] = file.digest
        except CallerError:
            # It is gone, or just being written.
            found[uri] = None
    return found
