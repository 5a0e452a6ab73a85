"""The environment of a runner whose pid 1 is an ordinary Python."""

from collections.abc import Mapping

_SHARED = ("LANG", "LC_", "TZ")
_NOWHERE = "/nonexistent"


def beside_pid_1(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for commands under names of ours, so that they do not steer pid 1.

    Its language and time zone are theirs; its home is nowhere, for it loads packages from there.
    """
    shared = {name: value for name, value in variables.items() if name.startswith(_SHARED)}
    renamed = {f"MCP_SANDBOX_ENV_{name}": value for name, value in variables.items()}
    return {**shared, "HOME": _NOWHERE, **renamed}
