"""The extension io.modelcontextprotocol/skills (SEP-2640).

`skills/list` has the skills that every host of the extension takes. Those that we read more
leniently than hosts do are answered by `skills/get` and read like the others.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mcp.server.extension import Extension, MethodBinding
from mcp.types import PaginatedRequestParams, RequestParams

from mcp_sandbox.errors import CallerError, UnknownSkill
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.skills.entries import entry, suits_hosts
from mcp_sandbox.server.skills.pages import cursor_after, page
from mcp_sandbox.server.skills.resources import FRESH, children, described
from mcp_sandbox.server.skills.visible import Asked, Visible, canonical, shown

_MOST_ENTRIES = 200
_ENOUGH_BYTES = 512 << 10


class UriParams(RequestParams):
    """Parameters that name a skill."""

    uri: str


class DirectoryParams(PaginatedRequestParams):
    """Parameters that name a directory."""

    uri: str


class SkillsExtension(Extension):
    """Tells hosts which skills there are, down to the digest of each file."""

    identifier = "io.modelcontextprotocol/skills"

    def __init__(self, visible: Visible) -> None:
        self._visible = visible

    def settings(self) -> dict[str, Any]:
        return {"directoryRead": True}

    def methods(self) -> Sequence[MethodBinding]:
        return (
            MethodBinding("skills/list", PaginatedRequestParams, self._list),
            MethodBinding("skills/get", UriParams, self._get),
            MethodBinding("resources/directory/read", DirectoryParams, self._directory),
        )

    @protocol_errors
    async def _list(self, asked: Asked, params: PaginatedRequestParams) -> dict[str, Any]:
        catalogue = await self._visible.catalogue(asked)
        listed = filter(suits_hosts, catalogue.skills)
        found = page(listed, lambda skill: skill.uri, params.cursor, _MOST_ENTRIES)
        entries: list[dict[str, Any]] = []
        size = 0
        for skill in found.items:
            # One that went meanwhile, or is just being written, is left out.
            with suppress(CallerError):
                entries.append(await entry(self._visible.library, skill))
                size += len(json.dumps(entries[-1]))
            if size > _ENOUGH_BYTES and skill is not found.items[-1]:
                return _result("skills", entries, cursor_after(skill.uri))
        return _result("skills", entries, found.next_cursor)

    @protocol_errors
    async def _get(self, asked: Asked, params: UriParams) -> dict[str, Any]:
        catalogue = await self._visible.catalogue(asked)
        skill = catalogue.by_uri.get(canonical(params.uri))
        if skill is None:
            raise UnknownSkill(f"no skill is served at {shown(params.uri)}: skills/list has some")
        return {"skill": await entry(self._visible.library, skill), **FRESH}

    @protocol_errors
    async def _directory(self, asked: Asked, params: DirectoryParams) -> dict[str, Any]:
        catalogue = await self._visible.catalogue(asked)
        inside = await children(self._visible, catalogue, canonical(params.uri))
        if not inside:
            problem = f"{shown(params.uri)} is no directory resource: skill:// has them all"
            raise UnknownSkill(problem)
        found = page(inside, lambda child: child.uri, params.cursor, _MOST_ENTRIES)
        resources = [described(child) for child in found.items]
        return _result("resources", resources, found.next_cursor)


def _result(key: str, items: list[Any], next_cursor: str | None) -> dict[str, Any]:
    more = {} if next_cursor is None else {"nextCursor": next_cursor}
    return {key: items, **more, **FRESH}
