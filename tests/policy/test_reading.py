"""What is read of Python, held against Python's own parser."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sandbox.reading.code import python_statements, read_imports


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.whole)])
def test_python_imports_are_those_that_pythons_own_parser_sees(every: int) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [*folder.glob("*.py"), *(folder / "asyncio").glob("*.py")]
    wrong, seen = {}, 0
    for path in sorted(files)[::every]:
        text = path.read_text(errors="replace")
        expected = set(_imports(ast.parse(text)))
        read = (each for tokens in python_statements(text) for each in read_imports(tokens))
        found = {module.partition(".")[0] for module, _, _ in read if module[:1] != "."}
        seen += len(expected)
        if found != expected:
            wrong[path.name] = found ^ expected
    assert seen > 500 / every
    assert wrong == {}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]
