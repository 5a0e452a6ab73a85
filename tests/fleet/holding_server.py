"""`mcp-sandbox` whose sandboxes of unsafe-local hold their files themselves."""

import runpy

from tests.holding import holding_files

with holding_files():
    runpy.run_module("mcp_sandbox", run_name="__main__")
