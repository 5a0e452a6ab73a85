"""Tools that read, find and change files inside the sandbox."""

import base64
from typing import Annotated, Literal

from mcp.types import CallToolResult
from pydantic import Field

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.server import results
from mcp_sandbox.server.tool import CHANGES, READS, Limit, Line, Path, Pattern, Text, build_tool
from mcp_sandbox.sessions.session import Session


async def read_file(
    session: Session,
    path: Path,
    offset: Annotated[Line, Field(description="First line.")] = 1,
    limit: Annotated[Limit, Field(description="Number of lines.")] = 2000,
) -> CallToolResult:
    """Read a file: text as numbered lines, images as images, other files as a description."""
    return results.format_file(await session.read_file(path, offset=offset, limit=limit))


async def write_file(
    session: Session,
    path: Path,
    content: Text,
    encoding: Literal["utf-8", "base64"] = "utf-8",
    append: bool = False,
) -> CallToolResult:
    """Create or replace a file, or append to it. Missing directories are made."""
    data = content.encode() if encoding == "utf-8" else _decoded(content)
    return results.write_result(await session.write_file(path, data, append=append), append=append)


async def edit_file(
    session: Session,
    path: Path,
    old: Annotated[Text, Field(description="Exact text; unique unless replace_all.", min_length=1)],
    new: Text,
    replace_all: bool = False,
    dry_run: Annotated[bool, Field(description="Only show the diff.")] = False,
) -> CallToolResult:
    """Replace text in a file and see the diff. Leave out the line numbers that read_file shows."""
    edited = await session.edit_file(path, old, new, replace_all=replace_all, dry_run=dry_run)
    return results.format_edit(edited, dry_run=dry_run)


async def list_files(
    session: Session,
    path: Path = ".",
    depth: Annotated[int, Field(ge=1, le=10)] = 1,
    limit: Limit = 500,
    hidden: bool = True,
) -> CallToolResult:
    """List a directory: name, type, size, time and link target of every entry."""
    return results.fit_files(
        await session.list_files(path, depth=depth, limit=limit, hidden=hidden)
    )


async def glob(
    session: Session,
    pattern: Annotated[Pattern, Field(description="Such as **/*.py")],
    path: Path = ".",
    limit: Limit = 500,
) -> CallToolResult:
    """Find files by name, newest first."""
    return results.format_glob(await session.glob(pattern, path, limit=limit))


async def grep(
    session: Session,
    pattern: Annotated[Pattern, Field(description="Regular expression, as in Python.")],
    path: Path = ".",
    *,
    glob: Annotated[Pattern | None, Field(description="Only files like *.py")] = None,
    ignore_case: bool = False,
    context: Annotated[int, Field(ge=0, le=20, description="Lines around a match.")] = 0,
    limit: Limit = 200,
) -> CallToolResult:
    """Search file contents for a regular expression. Answers file:line:text."""
    found = await session.grep(
        pattern, path, glob=glob, ignore_case=ignore_case, context=context, limit=limit
    )
    return results.format_grep(found)


async def delete_file(
    session: Session,
    path: Path,
    recursive: Annotated[bool, Field(description="Needed for directories with content.")] = False,
) -> CallToolResult:
    """Delete a file or directory. There is no undo."""
    return results.delete_result(await session.delete_file(path, recursive=recursive))


async def move_file(
    session: Session, source: Path, destination: Path, overwrite: bool = False
) -> CallToolResult:
    """Move or rename a file or directory."""
    return results.move_result(await session.move_file(source, destination, overwrite=overwrite))


def _decoded(content: str) -> bytes:
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except ValueError as exc:
        raise InvalidArgument(
            f"content is not base64 ({exc}): encode it again, or give text with encoding=utf-8"
        ) from exc


_ADDS = CHANGES.model_copy(update={"destructive_hint": False})
FILE_TOOLS = [
    build_tool(read_file, title="Read a file", annotations=READS),
    build_tool(write_file, title="Write a file", annotations=CHANGES),
    build_tool(edit_file, title="Edit a file", annotations=CHANGES),
    build_tool(list_files, title="List files", annotations=READS, output=results.ListedFiles),
    build_tool(glob, title="Find files by name", annotations=READS),
    build_tool(grep, title="Search in files", annotations=READS),
    build_tool(delete_file, title="Delete a file", annotations=CHANGES),
    build_tool(move_file, title="Move a file", annotations=_ADDS),
]
