"""MCP Inspector: the list of servers that its web page, terminal and command line share."""

from mcp_sandbox.clients.entry import CHAT_HEADER, TOKEN_VARIABLE, Target, http_entry, stdio_entry
from mcp_sandbox.config import client_folder

_COMMAND = "npx @modelcontextprotocol/inspector@2.12.0 --cli --server sandbox --method tools/list"
_CHAT = "inspector"


def for_user(address: str | None = None) -> Target:
    """Return the place for this user; the Inspector's calls all belong to one chat.

    Raises:
        ConfigError: the address cannot be used.
    """
    # It fills no variables in, so the token is given on its command line; and headers there stand
    # for all of the file's, so the chat is named again.
    by_http = address and http_entry(address, chat=_CHAT, token=None)
    headers = (f"Authorization: Bearer ${TOKEN_VARIABLE}", f"{CHAT_HEADER}: {_CHAT}")
    told = "".join(f' --header "{each}"' for each in headers) if address else ""
    return Target(
        path=client_folder() / ".mcp-inspector" / "mcp.json",
        section="mcpServers",
        entry={**(by_http or stdio_entry("--chat", _CHAT)), "protocolEra": "auto"},
        next_step=f"Run `{_COMMAND}{told}`.",
        private=True,
    )
