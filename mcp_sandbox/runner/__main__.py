"""Start of the runner: `python3 -I -S .../mcp_sandbox/runner/__main__.py`, settings by environment.

MCP_SANDBOX_TOKEN, MCP_SANDBOX_SOCKET, MCP_SANDBOX_WORKSPACE, MCP_SANDBOX_HOME, MCP_SANDBOX_IDLE_S,
MCP_SANDBOX_LIMITS and MCP_SANDBOX_OOM_SCORE are ours; the rest of the environment is what commands
will see.
"""

from __future__ import annotations

import os
import sys

_PREFIX = "MCP_SANDBOX_"
_KEPT = ("WORKSPACE", "HOME")


def main() -> None:
    """Hide, take the settings out of the environment, serve."""
    sys.path.insert(0, os.path.abspath(__file__).rsplit("/", 3)[0])
    from mcp_sandbox.runner import processes  # noqa: PLC0415

    everything = dict(os.environ)
    settings = {k[len(_PREFIX) :]: v for k, v in everything.items() if k.startswith(_PREFIX)}
    processes.limit(settings.get("LIMITS", ""), settings.get("OOM_SCORE"))
    # Before anything of the user runs: nobody of our own user may look into this process.
    processes.hide_memory()
    processes.rename("mcp-sandbox")
    env = {k: v for k, v in everything.items() if not k.startswith(_PREFIX)}
    # Set anew: the kernel's copy, to which the C library still points, is wiped.
    os.environ.clear()
    os.environ.update(env)
    os.environ.update({_PREFIX + k: v for k, v in settings.items() if k in _KEPT})
    # It starts while we load the rest.
    from mcp_sandbox.runner import interpreter  # noqa: PLC0415

    warm = interpreter.start(env)
    from mcp_sandbox.runner.server import Server  # noqa: PLC0415

    Server(settings, env, warm).run()


main()
