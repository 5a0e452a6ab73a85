"""Hints of `make check`: the files and classes that have grown large. They fail nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("mcp_sandbox", "tests", "benchmarks", "skills")
LINES_OF_A_FILE = 600
METHODS_OF_A_CLASS = 25


def hints(path: Path) -> Iterator[str]:
    """Yield a line for each thing in a file that is larger than it should be."""
    text = path.read_text()
    if (lines := text.count("\n")) > LINES_OF_A_FILE:
        yield f"{path.relative_to(ROOT)} has {lines} lines; {LINES_OF_A_FILE} can be overseen"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in node.body)
        if methods > METHODS_OF_A_CLASS:
            yield f"{path.relative_to(ROOT)}: {node.name} has {methods} methods"


if __name__ == "__main__":
    for folder in FOLDERS:
        for source in sorted((ROOT / folder).rglob("*.py")):
            print(*(f"hint: {line}\n" for line in hints(source)), sep="", end="")
