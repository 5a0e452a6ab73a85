"""The file operations a worker can run, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.call import explained
from mcp_sandbox.runner.files.moving import delete, move
from mcp_sandbox.runner.files.reading import read, read_lines
from mcp_sandbox.runner.files.search import glob, grep
from mcp_sandbox.runner.files.walk import list_directory
from mcp_sandbox.runner.files.writing import edit, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.files.call import Op, OperationCall


_ALL = (read, read_lines, write, edit, glob, grep, delete, move)
OPS: dict[str, Op] = {each.__name__: explained(each) for each in _ALL}
OPS["list"] = explained(list_directory)


def _archive(name: str) -> Callable[[OperationCall], dict[str, Any]]:
    def run(call: OperationCall) -> dict[str, Any]:
        # Few sandboxes need it, and tarfile takes 10 ms to import.
        from mcp_sandbox.runner.files import archive  # noqa: PLC0415

        operation: Callable[[OperationCall], dict[str, Any]] = getattr(archive, name)
        return operation(call)

    return run


OPS |= {name: explained(_archive(name)) for name in ("pack", "unpack")}
