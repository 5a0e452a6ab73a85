"""The environment of a sandbox's commands, and of a runner whose pid 1 is an ordinary Python."""

from collections.abc import Mapping

from mcp_sandbox.models import SandboxSpec

# For every command, unless told otherwise. What Python prints is kept when it is killed.
USUAL = {"LANG": "C.UTF-8", "TZ": "UTC", "PYTHONUNBUFFERED": "1"}
_SHARED = ("LANG", "LC_", "TZ")
_NOWHERE = "/nonexistent"


def environment(spec: SandboxSpec, path: str, home: str) -> dict[str, str]:
    """The environment of commands; nothing of the server's own is in it."""
    return {"PATH": path, **USUAL, **spec.env, "HOME": home}


def beside_pid_1(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for commands under names of ours, so that they do not steer pid 1.

    Its language and time zone are theirs; its home is nowhere, for it loads packages from there.
    """
    shared = {name: value for name, value in variables.items() if name.startswith(_SHARED)}
    renamed = {f"MCP_SANDBOX_ENV_{name}": value for name, value in variables.items()}
    return {**shared, "HOME": _NOWHERE, **renamed}
