"""Claude Code: `.mcp.json` of a project, or its own settings file for all projects of a user.

It tells the server which conversation it is by the environment, so the entry names no chat.
"""

from pathlib import Path

from mcp_sandbox.clients.entry import Target, stdio_entry
from mcp_sandbox.config import client_folder


def in_project(project: Path) -> Target:
    """Return the place for everybody who opens this project; each is asked for consent once."""
    return Target(
        path=project / ".mcp.json",
        section="mcpServers",
        entry=stdio_entry(),
        next_step="Start `claude` in this folder and approve the server `sandbox`.",
    )


def for_user() -> Target:
    """Return the place for all projects of this user."""
    return Target(
        path=client_folder("CLAUDE_CONFIG_DIR") / ".claude.json",
        section="mcpServers",
        entry=stdio_entry(),
        next_step="Start `claude` in any folder; `/mcp` shows the server `sandbox`.",
        private=True,
    )
