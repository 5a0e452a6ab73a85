"""An SDK server with a tool that does nothing: what a tool call costs at least.

On stdin and stdout, or over HTTP on the port that is given.
"""

import sys

from mcp.server import MCPServer

server = MCPServer("noop")


@server.tool(structured_output=False)
async def noop(command: str) -> str:
    """Do nothing."""
    return command


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
