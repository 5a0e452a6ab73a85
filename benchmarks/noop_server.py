"""An SDK server with a tool that does nothing: what a tool call costs at least."""

from mcp.server import MCPServer

server = MCPServer("noop")


@server.tool(structured_output=False)
async def noop(command: str) -> str:
    """Do nothing."""
    return command


if __name__ == "__main__":
    server.run("stdio")
