"""The file operations a worker can run: each takes (args, stdin, stdout) and returns its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.edit import edit
from mcp_sandbox.runner.files.listing import list_directory, stat_path
from mcp_sandbox.runner.files.moving import move
from mcp_sandbox.runner.files.paths import relative, resolve, show
from mcp_sandbox.runner.files.problems import explained
from mcp_sandbox.runner.files.reading import read, read_lines
from mcp_sandbox.runner.files.removal import delete
from mcp_sandbox.runner.files.search import glob, grep
from mcp_sandbox.runner.files.writing import write
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Call
    from mcp_sandbox.runner.files.problems import Op


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
