"""The agent programs that can be run, by their names.

    base             what an executor does, and what it is given
    claude, codex    how these programs are started, and what the lines that they print mean
    direct           a command line that the request itself names

An executor knows no run, no model service and no sandbox: it writes a command and reads lines.
"""

from collections.abc import Mapping

from mcp_sandbox.agents.executors.base import Executor
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.agents.executors.codex import Codex
from mcp_sandbox.agents.executors.direct import Direct
from mcp_sandbox.errors import InvalidArgument

EXECUTORS: Mapping[str, type[Executor]] = {each.name: each for each in (Claude, Codex, Direct)}


def find_executor(command: str) -> type[Executor]:
    """Return the executor of that name.

    Raises InvalidArgument: there is none; the message names those there are.
    """
    if command in EXECUTORS:
        return EXECUTORS[command]
    why = f"unknown command type: {command[:40]}" if command else "options cannot be empty"
    if command == "cursor":
        why = (
            "cursor is not run here: its agent is in no package registry, and takes its model from "
            "no other address: its key would have to be inside"
        )
    raise InvalidArgument(f"{why}: choose one of {', '.join(EXECUTORS)}")
