"""`python -m mcp_sandbox` is `mcp-sandbox`."""

from mcp_sandbox.cli import main

main()
