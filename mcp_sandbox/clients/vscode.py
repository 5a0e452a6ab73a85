"""Visual Studio Code: `.vscode/mcp.json` of a project, whose object is called `servers`.

As with Cursor a project is a chat, and the editor fills in its folder.
"""

from pathlib import Path

from mcp_sandbox.clients.entry import TOKEN_VARIABLE, Target, http_entry, stdio_entry
from mcp_sandbox.daemon.greeting import chat_of_project


def in_project(project: Path, address: str | None = None) -> Target:
    """Return the place for everybody who opens this project; `address` is that of a server.

    Raises:
        ConfigError: the address cannot be used.
    """
    token = f"${{env:{TOKEN_VARIABLE}}}"
    by_http = address and http_entry(address, chat=chat_of_project(project), token=token)
    first = f"Set {TOKEN_VARIABLE}, then open" if address else "Open"
    return Target(
        path=project / ".vscode" / "mcp.json",
        section="servers",
        entry=by_http or stdio_entry("--project", "${workspaceFolder}"),
        next_step=f"{first} this folder in VS Code, run `MCP: List Servers` and start `sandbox`.",
    )
