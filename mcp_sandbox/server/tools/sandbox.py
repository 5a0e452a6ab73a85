"""Tools about the sandbox itself."""

from typing import Annotated

from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.results import plain
from mcp_sandbox.server.structured import SandboxInfoReport, sandbox_report
from mcp_sandbox.server.tool import SandboxTool, build_tool
from mcp_sandbox.sessions.session import Session


async def sandbox_info(session: Session) -> CallToolResult:
    """Describe this computer: languages and tools found, network, limits, disk space."""
    return sandbox_report(await session.info())


async def sandbox_reset(
    session: Session,
    keep_files: Annotated[bool, Field(description="false: also empty /workspace.")] = True,
) -> CallToolResult:
    """Start this computer anew: kills every process and clears /tmp. Files are kept by default."""
    return plain(await session.reset(keep_files=keep_files))


def sandbox_tools(session_for: SessionFor) -> list[SandboxTool]:
    """sandbox_info and sandbox_reset."""
    info = ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    reset = ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    )
    return [
        build_tool(
            sandbox_info,
            session_for,
            title="Describe the sandbox",
            annotations=info,
            output=SandboxInfoReport,
        ),
        build_tool(sandbox_reset, session_for, title="Reset the sandbox", annotations=reset),
    ]
