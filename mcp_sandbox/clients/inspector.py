"""MCP Inspector: the list of servers that its web page, terminal and command line share."""

from mcp_sandbox.clients.entry import Target, stdio_entry
from mcp_sandbox.config import client_folder

_COMMAND = "npx @modelcontextprotocol/inspector@2.12.0"


def for_user() -> Target:
    """Return the place for this user; the Inspector's calls all belong to one chat."""
    return Target(
        path=client_folder() / ".mcp-inspector" / "mcp.json",
        section="mcpServers",
        entry={**stdio_entry("--chat", "inspector"), "protocolEra": "auto"},
        next_step=f"Run `{_COMMAND} --cli --server sandbox --method tools/list`.",
        private=True,
    )
