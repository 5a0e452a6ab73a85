"""The extension io.modelcontextprotocol/skills (SEP-2640).

`skills/list` has the skills that every host of the extension takes. Those that we read more
leniently than hosts do are answered by `skills/get` and read like the others.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from mcp.server.extension import Extension, MethodBinding
from mcp.types import PaginatedRequestParams, RequestParams

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.skills.pages import cursor_after, page
from mcp_sandbox.server.skills.resources import FRESH, children, described
from mcp_sandbox.server.skills.visible import Asked, Visible, canonical, shown
from mcp_sandbox.skills.core_schema import as_json
from mcp_sandbox.skills.models import Json, Skill
from mcp_sandbox.skills.rules import DESCRIPTION_CHARACTERS, NAME_CHARACTERS
from mcp_sandbox.skills.uris import file_uri

_MOST_ENTRIES = 200
_ENOUGH_BYTES = 512 << 10
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Where the YAML that hosts find in the file is none, or other than ours.
_REFUSED = {"byte-order-mark", "blank-first-line", "dots", "unquoted", "no-name"}


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
            if size > _ENOUGH_BYTES:
                return _result("skills", entries, cursor_after(entries[-1]["uri"]))
            entries.append(await self._entry(skill))
            size += len(json.dumps(entries[-1]))
        return _result("skills", entries, found.next_cursor)

    @protocol_errors
    async def _get(self, asked: Asked, params: UriParams) -> dict[str, Any]:
        catalogue = await self._visible.catalogue(asked)
        skill = catalogue.by_uri.get(canonical(params.uri))
        if skill is None:
            raise UnknownSkill(f"no skill is served at {shown(params.uri)}: skills/list has some")
        return {"skill": await self._entry(skill), **FRESH}

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

    async def _entry(self, skill: Skill) -> dict[str, Any]:
        contents = await self._visible.library.contents(skill)
        files = [
            {"uri": file_uri(skill.uri, file.path), "digest": file.digest, "size": file.size}
            for file in contents.files
        ]
        return {"uri": skill.uri, "frontmatter": front_matter(skill), "resources": files}


def suits_hosts(skill: Skill) -> bool:
    """Whether every host of the extension takes the skill: most refuse what is not exact."""
    name, description = (as_json(skill.front.fields.get(key)) for key in ("name", "description"))
    return (
        name == skill.name
        and len(name) <= NAME_CHARACTERS
        and _NAME.fullmatch(name) is not None
        and isinstance(description, str)
        and len(description) <= DESCRIPTION_CHARACTERS
        and not any(each.code in _REFUSED for each in skill.diagnostics)
    )


def front_matter(skill: Skill) -> Json:
    """The front matter as a host reads it; name and description are always there, and text."""
    fields = as_json(dict(skill.front.fields))
    assert isinstance(fields, dict)  # noqa: S101
    for key, value in (("name", skill.name), ("description", skill.front.description)):
        if not isinstance(fields.get(key), str):
            fields[key] = value
    return fields


def _result(key: str, items: list[Any], next_cursor: str | None) -> dict[str, Any]:
    more = {} if next_cursor is None else {"nextCursor": next_cursor}
    return {key: items, **more, **FRESH}
