"""The tool by which an agent asks its user for hosts."""

from typing import Annotated

from mcp.types import CallToolResult
from pydantic import Field, StringConstraints

from mcp_sandbox.server.results import texts
from mcp_sandbox.server.text import show
from mcp_sandbox.server.tool import CHANGES, build_tool
from mcp_sandbox.sessions.session import Session

Host = Annotated[str, StringConstraints(min_length=1, max_length=260)]
Hosts = Annotated[
    list[Host],
    Field(min_length=1, max_length=10, description="HOST or HOST:PORT; without a port 80 and 443."),
]
Reason = Annotated[
    str, Field(min_length=1, max_length=400, description="Why, in a few words for the user.")
]


async def network_access(
    session: Session,
    hosts: Hosts,
    reason: Reason,
    write: Annotated[bool, Field(description="Also upload and change, not only read.")] = False,
) -> CallToolResult:
    """Ask the user to let this computer reach hosts, when a connection was refused.

    Name at once all that the task needs: a package often comes from other hosts than its index.
    """
    return texts([show(await session.network_access(hosts, reason, write=write))], {})


_ASKS = CHANGES.model_copy(update={"destructive_hint": False, "open_world_hint": True})
NETWORK_TOOLS = [build_tool(network_access, title="Ask for network access", annotations=_ASKS)]
