"""A skill as hosts of the extension get to know it, and whether they take it."""

import re
from typing import Any

from mcp_sandbox.skills.core_schema import as_json
from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.models import Json, Skill
from mcp_sandbox.skills.rules import DESCRIPTION_CHARACTERS, NAME_CHARACTERS
from mcp_sandbox.skills.uris import file_uri

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Where the YAML that hosts find in the file is none, or other than ours.
_REFUSED = {"byte-order-mark", "blank-first-line", "dots", "unquoted", "no-name"}


async def entry(library: Library, skill: Skill) -> dict[str, Any]:
    """The uri, the front matter, and the digest and size of each file.

    Raises:
        UnknownSkill: it is gone.
    """
    files = [
        {"uri": file_uri(skill.uri, file.path), "digest": file.digest, "size": file.size}
        for file in (await library.contents(skill)).files
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
