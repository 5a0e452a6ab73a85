"""The file operations a worker can run: each takes (args, stdin, stdout) and returns its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.edit import edit
from mcp_sandbox.runner.listing import list_directory, stat_path
from mcp_sandbox.runner.moving import move
from mcp_sandbox.runner.paths import relative, resolve, show
from mcp_sandbox.runner.problems import explained
from mcp_sandbox.runner.protocol import OpError
from mcp_sandbox.runner.reading import read, read_lines
from mcp_sandbox.runner.removal import delete
from mcp_sandbox.runner.search import glob, grep
from mcp_sandbox.runner.writing import write

if TYPE_CHECKING:
    from mcp_sandbox.runner.call import Call
    from mcp_sandbox.runner.problems import Op


def mkdir(call: Call) -> dict[str, Any]:
    """Make a directory and those above it; one that is there already is fine."""
    path = resolve(call.text("path"))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise OpError("exists", f"{show(path)} is there and is no directory: choose another name")
    os.makedirs(path, exist_ok=True)
    return {"path": relative(path)}


OPS: dict[str, Op] = {
    "read": explained(read),
    "read_lines": explained(read_lines),
    "write": explained(write),
    "edit": explained(edit),
    "list": explained(list_directory),
    "glob": explained(glob),
    "grep": explained(grep),
    "delete": explained(delete),
    "move": explained(move),
    "mkdir": explained(mkdir),
    "stat": explained(stat_path),
}
