"""Claude Code: `.mcp.json` of a project, or its own settings file for all projects of a user.

It tells the server which conversation it is by the environment, so the entry names no chat.
"""

from pathlib import Path

from mcp_sandbox.clients.entry import TOKEN_VARIABLE, Target, http_entry, stdio_entry
from mcp_sandbox.config import client_folder
from mcp_sandbox.daemon.greeting import chat_of_project


def in_project(project: Path, address: str | None = None) -> Target:
    """Return the place for everybody who opens this project; each is asked for consent once.

    With an HTTP `address` the project is a chat: Claude tells such a server no conversation.

    Raises:
        ConfigError: the address cannot be used.
    """
    token = f"${{{TOKEN_VARIABLE}}}"
    by_http = address and http_entry(address, chat=chat_of_project(project), token=token)
    first = f"Set {TOKEN_VARIABLE}, then start" if address else "Start"
    return Target(
        path=project / ".mcp.json",
        section="mcpServers",
        entry=by_http or stdio_entry(),
        next_step=f"{first} `claude` in this folder and approve the server `sandbox`.",
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
