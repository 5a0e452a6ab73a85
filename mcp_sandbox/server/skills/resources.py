"""Skills as resources: every SKILL.md is listed, every file can be read, as the bytes it has.

Beside them lies what is wrong with skills (`skills://diagnostics`), and which ones the chat has
activated (`skills://active`).
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

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

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.skills.pages import page
from mcp_sandbox.server.skills.problems import problems_as_json
from mcp_sandbox.server.skills.visible import (
    Asked,
    Visible,
    around,
    folder_uri,
)
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import Skill, SkillFile
from mcp_sandbox.skills.roots import Whose
from mcp_sandbox.skills.uris import SCHEME, file_uri

FRESH: Mapping[str, Any] = {"ttlMs": 0, "cacheScope": "private"}
"""Each user has a catalogue of its own, which may have changed since."""
TEMPLATE = "skill://{+skill}/{+path}"
DIAGNOSTICS = "skills://diagnostics"
ACTIVE = "skills://active"
_MOST_LISTED = 500
_FOLDER = "inode/directory"
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
        uri=ACTIVE,
        name="skill-active",
        title="Skills that this chat uses",
        description="Which skills this chat has activated, and which version of each: what to "
        "attach again when the conversation was shortened.",
        mime_type="application/json",
    ),
    Resource(
        uri=DIAGNOSTICS,
        name="skill-diagnostics",
        title="What is wrong with skills",
        description="Folders with a SKILL.md that are not offered, and skills that have a flaw: "
        "what it is and how to mend it.",
        mime_type="application/json",
    ),
]


class SkillResources:
    """Answers the protocol's requests about resources."""

    def __init__(self, visible: Visible) -> None:
        self._visible = visible

    @protocol_errors
    async def list(self, asked: Asked, params: PaginatedRequestParams) -> ListResourcesResult:
        """Our own, and the SKILL.md of what a model may use; clients show models this list."""
        catalogue = await self._visible.catalogue(asked)
        documents = (skill for skill in catalogue.skills if skill.front.model_invocable)
        known: list[Resource | Skill] = [*_OWN, *documents]
        found = page(known, lambda each: each.uri, params.cursor, _MOST_LISTED)
        listed = [of_document(each) if isinstance(each, Skill) else each for each in found.items]
        return ListResourcesResult(resources=listed, next_cursor=found.next_cursor)

    async def templates(
        self, _asked: Asked, _params: PaginatedRequestParams
    ) -> ListResourceTemplatesResult:
        """The one for all files."""
        return ListResourceTemplatesResult(resource_templates=_TEMPLATES)

    @protocol_errors
    async def read(self, asked: Asked, params: ReadResourceRequestParams) -> ReadResourceResult:
        """A file's bytes; text is text and everything else base64."""
        uri = params.uri
        catalogue = await self._visible.catalogue(asked)
        if uri == DIAGNOSTICS:
            return _text(uri, "application/json", problems_as_json(catalogue))
        if uri == ACTIVE:
            return _text(uri, "application/json", self._active(self._visible.whose(asked)))
        try:
            skill, file = await self._visible.file(catalogue, uri)
            data = await self._visible.library.read(skill, file.path)
        except UnknownSkill as exc:
            raise MCPError(code=INVALID_PARAMS, message=str(exc), data={"uri": uri}) from exc
        return _contents(uri, file, data)

    def _active(self, whose: Whose) -> str:
        # What names no chat has activated nothing.
        known = self._visible.skills.learned(whose).active if isinstance(whose, ChatId) else {}
        again = "Its text once more: skill_activate with this name and refresh=true."
        active = [{**asdict(each), "again": again} for each in known.values()]
        return json.dumps({"active": active}, indent=1)


async def children(visible: Visible, catalogue: Catalogue, uri: str) -> list[Resource]:
    """What lies directly in a directory; nothing if there is no such directory."""
    prefix = uri if uri == SCHEME else f"{uri}/"
    inside: dict[str, Resource] = {}
    for skill in catalogue.skills:
        _add_folder(inside, prefix, f"{folder_uri(skill)}/")
    for skill in around(catalogue, uri):
        for file in (await visible.library.contents(skill)).files:
            _add_file(inside, prefix, file_uri(skill.uri, file.path), file)
    for document in inside.keys() & catalogue.by_uri.keys():
        inside[document] = of_document(catalogue.by_uri[document])
    return [*inside.values()]


def of_document(skill: Skill) -> Resource:
    """A skill's SKILL.md as the resource that stands for the skill."""
    return Resource(
        uri=skill.uri,
        name=skill.name,
        description=skill.front.description,
        mime_type="text/markdown",
    )


def described(resource: Resource) -> dict[str, Any]:
    """A resource as it goes over the wire."""
    return resource.model_dump(by_alias=True, mode="json", exclude_none=True)


def _add_folder(inside: dict[str, Resource], prefix: str, deeper: str) -> None:
    """Note the folder directly in `prefix` through which the way to a deeper place leads."""
    if deeper.startswith(prefix) and deeper != prefix:
        name = deeper.removeprefix(prefix).partition("/")[0]
        uri = prefix + name
        inside.setdefault(uri, Resource(uri=uri, name=name, mime_type=_FOLDER))


def _add_file(inside: dict[str, Resource], prefix: str, uri: str, file: SkillFile) -> None:
    rest = uri.removeprefix(prefix)
    if not uri.startswith(prefix) or "/" in rest:
        _add_folder(inside, prefix, uri)
        return
    name = file.path.rpartition("/")[2]
    inside[uri] = Resource(uri=uri, name=name, mime_type=file.mime, size=file.size)


def _contents(uri: str, file: SkillFile, data: bytes) -> ReadResourceResult:
    if file.kind == "text":
        try:
            return _text(uri, file.mime, data.decode())
        except UnicodeDecodeError:
            # It was changed since its kind was found out.
            pass
    blob = base64.b64encode(data).decode()
    found = BlobResourceContents(uri=uri, mime_type=file.mime, blob=blob)
    return ReadResourceResult(contents=[found])


def _text(uri: str, mime: str, text: str) -> ReadResourceResult:
    found = TextResourceContents(uri=uri, mime_type=mime, text=text)
    return ReadResourceResult(contents=[found])
