"""The agent programs that can be run, by their names."""

from collections.abc import Mapping

from mcp_sandbox.agents.executor import Executor
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.errors import InvalidArgument

EXECUTORS: Mapping[str, type[Executor]] = {Claude.name: Claude}


def executor_of(command: str) -> type[Executor]:
    """Return the executor of that name.

    Raises:
        InvalidArgument: there is none; the message names those there are.
    """
    known = ", ".join(EXECUTORS)
    if not command:
        raise InvalidArgument(f"options cannot be empty: name a command, one of {known}")
    if command not in EXECUTORS:
        raise InvalidArgument(f"unknown command type: {command[:40]}: choose one of {known}")
    return EXECUTORS[command]
