"""The file operations a worker can run, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcp_sandbox.runner.files.archive import mark, measure, pack, unpack
from mcp_sandbox.runner.files.call import explain_errors
from mcp_sandbox.runner.files.moving import delete, move
from mcp_sandbox.runner.files.reading import read, read_lines
from mcp_sandbox.runner.files.search import glob, grep, list_directory
from mcp_sandbox.runner.files.writing import edit, write

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Op

_ALL = (read, read_lines, write, edit, glob, grep, delete, move, pack, unpack, mark, measure)
OPS: dict[str, Op] = {each.__name__: explain_errors(each) for each in _ALL}
OPS["list"] = explain_errors(list_directory)
