import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("mcp_sandbox", "tests", "benchmarks", "skills")
LINES_OF_A_FILE = 400
METHODS_OF_A_CLASS = 10
# One chat's computer has exactly the tools' verbs, and says whose, where and how it is; a
# class that splits them would only forward.
MORE_METHODS = {"Session": 15, "Files": 12}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")


def test_no_file_is_longer_than_one_can_read() -> None:
    lengths = {path: path.read_text().count("\n") for path in sources()}
    assert {str(p): n for p, n in lengths.items() if n > LINES_OF_A_FILE} == {}


def test_no_class_has_more_public_methods_than_one_can_remember() -> None:
    too_many = {
        f"{path}: {name}": count
        for path in sources()
        for name, count in public_methods(ast.parse(path.read_text()))
        if count > MORE_METHODS.get(name, METHODS_OF_A_CLASS)
    }
    assert too_many == {}


def public_methods(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            names = [n.name for n in node.body if isinstance(n, functions)]
            yield node.name, sum(not name.startswith("_") for name in names)
