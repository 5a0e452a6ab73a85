"""Skills as resources, and the extension io.modelcontextprotocol/skills (SEP-2640).

Every SKILL.md is listed, every file can be read, as the bytes it has. Beside them lies what is
wrong with skills (`skills://diagnostics`), and which ones the chat has activated
(`skills://active`). `skills/list` has the skills that every host of the extension takes. Those
that we read more leniently than hosts do are answered by `skills/get` and read like the others.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from mcp.server.extension import Extension, MethodBinding
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    BlobResourceContents,
    ListResourcesResult,
    ListResourceTemplatesResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)

from mcp_sandbox.errors import CallerError, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.skills.visible import (
    Asked,
    VisibleSkills,
    canonicalize,
    cursor_after,
    find_skills_around,
    folder_uri,
    show_given,
    take_page,
)
from mcp_sandbox.server.text import take_fitting
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.front_matter import as_json
from mcp_sandbox.skills.parse import DESCRIPTION_CHARACTERS, NAME_CHARACTERS
from mcp_sandbox.skills.skill import SCHEME, Diagnostic, Json, Skill, SkillFile, file_uri

_MOST_LISTED = 500
_MOST_ENTRIES = 200
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Where the YAML that hosts find in the file is none, or other than ours.
_REFUSED = {"byte-order-mark", "blank-first-line", "dots", "yaml", "key", "no-name"}
_REFUSAL = Diagnostic(
    "refused-by-hosts",
    "note",
    "Hosts of skills over MCP refuse it, so skills/list leaves it out; all else has it.",
    "Mend what is said of its name, its description and the form of its front matter.",
)
TEMPLATE = "skill://{+skill}/{+path}"
_DIAGNOSTICS = "skills://diagnostics"
_ACTIVE = "skills://active"
_TEMPLATES = [
    ResourceTemplate(
        uri_template=TEMPLATE,
        name="skill-file",
        title="A file of a skill",
        description="skill: the skill's path, such as shipped/skill-authoring; path: the file's "
        "path in the skill's folder, such as SKILL.md or references/guide.md",
    )
]
_OWN = [
    Resource(
        uri=_ACTIVE,
        name="skill-active",
        title="Skills that this chat uses",
        description="Which skills this chat has activated, and which version of each: what to "
        "attach again when the conversation was shortened.",
        mime_type="application/json",
    ),
    Resource(
        uri=_DIAGNOSTICS,
        name="skill-diagnostics",
        title="What is wrong with skills",
        description="Folders with a SKILL.md that are not offered, and skills that have a flaw: "
        "what it is and how to mend it.",
        mime_type="application/json",
    ),
]


class UriParams(PaginatedRequestParams):
    """Parameters that name a skill or a directory."""

    uri: str


class SkillResources(Extension):
    """Answers requests about resources, and tells hosts of skills down to each file's digest."""

    identifier = "io.modelcontextprotocol/skills"

    def __init__(self, visible: VisibleSkills) -> None:
        self._visible = visible

    def settings(self) -> dict[str, Any]:
        return {"directoryRead": True}

    def methods(self) -> Sequence[MethodBinding]:
        return (
            MethodBinding("skills/list", PaginatedRequestParams, protocol_errors(self._entries)),
            MethodBinding("skills/get", UriParams, protocol_errors(self._get)),
            MethodBinding("resources/directory/read", UriParams, protocol_errors(self._directory)),
        )

    async def list(self, asked: Asked, params: PaginatedRequestParams) -> ListResourcesResult:
        """List our own, and the SKILL.md of what a model may use; clients show models this list."""
        catalogue = await self._visible.catalogue(asked)
        documents = (skill for skill in catalogue.skills if skill.front.model_invocable)
        known: list[Resource | Skill] = [*_OWN, *documents]
        found, cursor = take_page(known, lambda each: each.uri, params.cursor, _MOST_LISTED)
        listed = [_of_document(each) if isinstance(each, Skill) else each for each in found]
        return ListResourcesResult(resources=listed, next_cursor=cursor)

    async def templates(
        self,
        _asked: Asked,
        params: PaginatedRequestParams,  # noqa: ARG002
    ) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=_TEMPLATES)

    async def read(self, asked: Asked, params: ReadResourceRequestParams) -> ReadResourceResult:
        """Return a file's bytes: text as text, everything else as base64."""
        uri = params.uri
        catalogue = await self._visible.catalogue(asked)
        if uri == _DIAGNOSTICS:
            return _text(uri, "application/json", _problems_as_json(catalogue))
        if uri == _ACTIVE:
            whose, active = self._visible.find_owner(asked), list[Json]()
            # What names no chat has activated nothing.
            if isinstance(whose, ChatId):
                known = self._visible.skills.find_activated(whose).active
                again = "Its text once more: skill_activate with this name and refresh=true."
                active = [{**asdict(each), "again": again} for each in known.values()]
            return _text(uri, "application/json", json.dumps({"active": active}, indent=1))
        try:
            skill, file = await self._visible.file(catalogue, uri)
            data = await self._visible.library.read(skill, file.path)
        except UnknownSkill as exc:
            raise MCPError(code=INVALID_PARAMS, message=str(exc), data={"uri": uri}) from exc
        # It may have changed since its kind was found out.
        with suppress(UnicodeDecodeError):
            if file.kind == "text":
                return _text(uri, file.mime, data.decode())
        blob = base64.b64encode(data).decode()
        found = BlobResourceContents(uri=uri, mime_type=file.mime, blob=blob)
        return ReadResourceResult(contents=[found])

    async def _entries(self, asked: Asked, params: PaginatedRequestParams) -> dict[str, Any]:
        listed = filter(_suits_hosts, (await self._visible.catalogue(asked)).skills)
        found, cursor = take_page(listed, lambda skill: skill.uri, params.cursor, _MOST_ENTRIES)
        entries: list[dict[str, Any]] = []
        size = 0
        for skill in found:
            # One that went meanwhile, or is just being written, is left out.
            with suppress(CallerError):
                entries.append(await self._entry(skill))
                size += len(json.dumps(entries[-1]))
            if size > 512 << 10 and skill is not found[-1]:
                return _fresh(skills=entries, nextCursor=cursor_after(skill.uri))
        return _fresh(skills=entries, nextCursor=cursor)

    async def _get(self, asked: Asked, params: UriParams) -> dict[str, Any]:
        skill = (await self._visible.catalogue(asked)).by_uri.get(canonicalize(params.uri))
        if skill is None:
            raise UnknownSkill(
                f"no skill is served at {show_given(params.uri)}: skills/list has some"
            )
        return _fresh(skill=await self._entry(skill))

    async def _entry(self, skill: Skill) -> dict[str, Any]:
        files = [
            {"uri": file_uri(skill.uri, file.path), "digest": file.digest, "size": file.size}
            for file in (await self._visible.library.contents(skill)).files
        ]
        return {"uri": skill.uri, "frontmatter": _front_matter(skill), "resources": files}

    async def _directory(self, asked: Asked, params: UriParams) -> dict[str, Any]:
        inside = await self._children(
            await self._visible.catalogue(asked), canonicalize(params.uri)
        )
        if not inside:
            problem = f"{show_given(params.uri)} is no directory resource: skill:// has them all"
            raise UnknownSkill(problem)
        found, cursor = take_page(inside, lambda child: child.uri, params.cursor, _MOST_ENTRIES)
        children = [
            child.model_dump(by_alias=True, mode="json", exclude_none=True) for child in found
        ]
        return _fresh(resources=children, nextCursor=cursor)

    async def _children(self, catalogue: Catalogue, uri: str) -> Sequence[Resource]:
        """Return what lies directly in a directory; nothing if there is no such directory."""
        prefix = uri if uri == SCHEME else f"{uri}/"
        places: dict[str, SkillFile | None] = {f"{folder_uri(s)}/": None for s in catalogue.skills}
        for skill in find_skills_around(catalogue, uri):
            files = (await self._visible.library.contents(skill)).files
            places |= {file_uri(skill.uri, file.path): file for file in files}
        inside: dict[str, Resource] = {}
        for place, file in places.items():
            name, deeper, _ = place.removeprefix(prefix).partition("/")
            here = prefix + name
            if not place.startswith(prefix) or place == prefix:
                continue
            if file is None or deeper:
                inside.setdefault(here, Resource(uri=here, name=name, mime_type="inode/directory"))
            elif place in catalogue.by_uri:
                inside[place] = _of_document(catalogue.by_uri[place])
            else:
                name = file.path.rpartition("/")[2]
                inside[place] = Resource(uri=place, name=name, mime_type=file.mime, size=file.size)
        return [*inside.values()]


def _fresh(**result: object) -> dict[str, Any]:
    """Return a result that holds for its user alone, until a change; None is left out."""
    fields = {key: value for key, value in result.items() if value is not None}
    return {**fields, "ttlMs": 0, "cacheScope": "private"}


def _problems_as_json(catalogue: Catalogue) -> str:
    """Return what is not offered, then the flaws of what is; `omitted` counts the rest."""
    problems = [
        {**about, **{k: v for k, v in asdict(diagnostic).items() if v is not None}}
        for about, diagnostic in _problems(catalogue)
    ]
    fitted = take_fitting(problems, 64_000, json.dumps)
    return json.dumps({"problems": fitted, "omitted": len(problems) - len(fitted)}, indent=1)


def _problems(catalogue: Catalogue) -> Iterator[tuple[dict[str, Any], Diagnostic]]:
    for problem in catalogue.problems:
        # Where the root lies on the host is no business of a client.
        place = "/".join(problem.folder.parts[-2:])
        for each in problem.diagnostics:
            about = {"folder": place, "root": problem.root, "offered": False}
            yield about, replace(each, reason=each.reason.replace(str(problem.folder), place))
    for skill in catalogue.skills:
        for each in (*skill.diagnostics, *([] if _suits_hosts(skill) else [_REFUSAL])):
            yield {"uri": skill.uri, "offered": True}, each


def _suits_hosts(skill: Skill) -> bool:
    """Return whether every host of the extension takes the skill: most refuse what is not exact."""
    name, description = (as_json(skill.front.fields.get(key)) for key in ("name", "description"))
    return (
        name == skill.name
        and len(name) <= NAME_CHARACTERS
        and _NAME.fullmatch(name) is not None
        and isinstance(description, str)
        and len(description) <= DESCRIPTION_CHARACTERS
        and not any(each.code in _REFUSED for each in skill.diagnostics)
    )


def _front_matter(skill: Skill) -> Json:
    """Return the front matter as a host reads it; name and description are always there as text."""
    fields = as_json(dict(skill.front.fields))
    assert isinstance(fields, dict)  # noqa: S101
    for key, value in (("name", skill.name), ("description", skill.front.description)):
        if not isinstance(fields.get(key), str):
            fields[key] = value
    return fields


def _of_document(skill: Skill) -> Resource:
    about = skill.front.description
    return Resource(uri=skill.uri, name=skill.name, description=about, mime_type="text/markdown")


def _text(uri: str, mime: str, text: str) -> ReadResourceResult:
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=mime, text=text)])
