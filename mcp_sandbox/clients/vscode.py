"""Visual Studio Code: `.vscode/mcp.json` of a project, whose object is called `servers`.

As with Cursor a project is a chat, and the editor fills in its folder.
"""

from pathlib import Path

from mcp_sandbox.clients.entry import Target, stdio_entry


def in_project(project: Path) -> Target:
    """Return the place for everybody who opens this project."""
    return Target(
        path=project / ".vscode" / "mcp.json",
        section="servers",
        entry=stdio_entry("--project", "${workspaceFolder}"),
        next_step="Open this folder in VS Code, run `MCP: List Servers` and start `sandbox`.",
    )
