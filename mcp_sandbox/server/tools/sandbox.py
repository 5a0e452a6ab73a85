"""Tools about the sandbox itself."""

from typing import Annotated

from mcp.types import CallToolResult
from pydantic import Field

from mcp_sandbox.server.results import SandboxInfoReport, sandbox_report, texts
from mcp_sandbox.server.text import show
from mcp_sandbox.server.tool import CHANGES, READS, build_tool
from mcp_sandbox.sessions.session import Session


async def sandbox_info(session: Session) -> CallToolResult:
    """Describe this computer: languages and tools found, network, limits, disk space."""
    return sandbox_report(await session.info())


async def sandbox_reset(
    session: Session,
    keep_files: Annotated[bool, Field(description="false: also empty /workspace.")] = True,
) -> CallToolResult:
    """Start this computer anew: kills every process and clears /tmp. Files are kept by default."""
    return texts([show(await session.reset(keep_files=keep_files))], {})


_RESETS, _INFO = CHANGES.model_copy(update={"idempotent_hint": True}), SandboxInfoReport
SANDBOX_TOOLS = [
    build_tool(sandbox_info, title="Describe the sandbox", annotations=READS, output=_INFO),
    build_tool(sandbox_reset, title="Reset the sandbox", annotations=_RESETS),
]
