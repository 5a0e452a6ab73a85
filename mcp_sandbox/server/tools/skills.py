"""Tools that teach the agent: finding skills, and reading one."""

from typing import Annotated

from mcp.types import CallToolResult
from pydantic import Field, StringConstraints

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.server.skills.results import (
    SkillsListed,
    format_activation,
    format_skill_file,
    format_skills,
)
from mcp_sandbox.server.tool import READS, Path, build_tool
from mcp_sandbox.sessions.session import Session

# Claude writes longer results to a file that the model rarely reads on.
_WHOLE = {"anthropic/maxResultSizeChars": 500_000}

Words = Annotated[str, StringConstraints(max_length=400)]
Cursor = Annotated[str, StringConstraints(max_length=4000)]
# No enumeration of the names: it would change the tools with every skill that comes or goes, and a
# wrong name is answered with the nearest.
# A uri may name six folders deep, each character in nine.
Name = Annotated[str, StringConstraints(min_length=1, max_length=8000)]
PageSize = Annotated[int, Field(ge=1, le=100)]
Offset = Annotated[int, Field(ge=0, le=2**31)]


async def skills_list(
    session: Session,
    query: Annotated[Words | None, Field(description="Words of the task.")] = None,
    cursor: Annotated[Cursor | None, Field(description="next_cursor of the page before.")] = None,
    limit: PageSize = 50,
) -> CallToolResult:
    """List skills (expert instructions for particular tasks), or search them with query."""
    return format_skills(await session.skills.list(query, cursor, limit))


async def skill_activate(
    session: Session,
    name: Annotated[Name, Field(description="Name or uri of a skill.")],
    path: Annotated[Path | None, Field(description="One of its files, to read that.")] = None,
    offset: Annotated[Offset, Field(description="With path: first byte.")] = 0,
    refresh: Annotated[bool, Field(description="Give the current text again.")] = False,
) -> CallToolResult:
    """Read a skill before you begin the task it is for, then follow it.

    Answers its instructions, its files and what this computer lacks of what it declares.
    """
    if path is None and offset:
        raise InvalidArgument("offset is for a file: give path too, or leave offset out")
    if path is not None and refresh:
        raise InvalidArgument("refresh is for the whole skill: leave path out, then read the file")
    if path is None:
        return format_activation(await session.skills.activate(name, refresh=refresh))
    file, data = await session.skills.read(name, path)
    return format_skill_file(file, data, offset)


_ACTIVATE = build_tool(skill_activate, title="Activate a skill", annotations=READS)
SKILL_TOOLS = [
    build_tool(skills_list, title="List skills", annotations=READS, output=SkillsListed),
    _ACTIVATE.model_copy(update={"meta": _WHOLE}),
]
