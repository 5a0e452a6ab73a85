"""Visual Studio Code: `.vscode/mcp.json` of a project, whose object is called `servers`."""

from pathlib import Path

from mcp_sandbox.clients.entry import TOKEN_VARIABLE, Target, folder_entry


def in_project(project: Path, address: str | None = None) -> Target:
    """Return the place for everybody who opens this project; `address` is that of a server.

    Raises:
        ConfigError: the address cannot be used.
    """
    first = f"Set {TOKEN_VARIABLE}, then open" if address else "Open"
    return Target(
        path=project / ".vscode" / "mcp.json",
        section="servers",
        entry=folder_entry(project, address),
        next_step=f"{first} this folder in VS Code, run `MCP: List Servers` and start `sandbox`.",
    )
