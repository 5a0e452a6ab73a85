"""A host's MCP server, `host_tools.py [PORT]`: on stdio, or by HTTP on a port of loopback."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("tools of the host")


@server.tool(structured_output=False)
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def pid() -> str:
    """Which process this is."""
    return str(os.getpid())


@server.tool()
def long(size: int) -> str:
    """As many characters."""
    return "x" * size


@server.tool()
def hang() -> str:
    """Answer in an hour."""
    time.sleep(3600)
    return ""


@server.tool()
def die() -> None:
    """End in the middle of a call."""
    os._exit(3)


@server.tool()
def babble() -> str:
    """Say what is no JSON."""
    os.write(1, b"no {json\n")
    return "said"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
