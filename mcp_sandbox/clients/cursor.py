"""Cursor: `.cursor/mcp.json` of a project.

It tells a server nothing of the conversation, so a project is a chat; Cursor fills in its folder.
"""

from pathlib import Path

from mcp_sandbox.clients.entry import Target, stdio_entry


def in_project(project: Path) -> Target:
    """Return the place for everybody who opens this project."""
    return Target(
        path=project / ".cursor" / "mcp.json",
        section="mcpServers",
        entry=stdio_entry("--project", "${workspaceFolder}"),
        next_step="Open this folder in Cursor and switch `sandbox` on under Settings > Tools.",
    )
