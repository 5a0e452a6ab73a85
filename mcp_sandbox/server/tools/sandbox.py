"""Tools about the sandbox itself."""

from functools import partial
from typing import Annotated

from mcp.types import CallToolResult
from pydantic import Field

from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.results import SandboxInfoReport, sandbox_report, texts
from mcp_sandbox.server.text import show
from mcp_sandbox.server.tool import CHANGES, READS, SandboxTool, build_tool
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


def sandbox_tools(session_for: SessionFor) -> list[SandboxTool]:
    """sandbox_info and sandbox_reset."""
    tool = partial(build_tool, session_for=session_for)
    reset, output = CHANGES.model_copy(update={"idempotent_hint": True}), SandboxInfoReport
    return [
        tool(sandbox_info, title="Describe the sandbox", annotations=READS, output=output),
        tool(sandbox_reset, title="Reset the sandbox", annotations=reset),
    ]
