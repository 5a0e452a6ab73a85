"""Folders that can be read as a table of contents, modules that are worth a file of their own."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES_OF_A_FOLDER = 12
LINES_OF_A_MODULE = 60
METHODS_OF_A_CLASS = 25
# A file that is longer fails nothing.
LINES_OF_A_HINT = 600

Rule = Callable[[Path], Iterator[str]]


def read_modules(package: Path) -> Mapping[str, Path]:
    """Return the file of each module of a package, by its dotted name; no `__init__`."""
    files = (file for file in sorted(package.rglob("*.py")) if file.name != "__init__.py")
    return {
        ".".join(file.relative_to(package.parent).with_suffix("").parts): file for file in files
    }


def imported_by(file: Path, package: Path, *, types_too: bool = True) -> Iterator[str]:
    """Yield the dotted names that a file imports, of modules and of what may be modules."""
    tree = ast.parse(file.read_text())
    if not types_too:
        tree.body = [each for each in tree.body if "TYPE_CHECKING:" not in ast.unparse(each)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{package.name}."):
            # Started as a program, or imported by its name when it is needed.
            yield str(node.value)


def crowded_folders(package: Path) -> Iterator[str]:
    """Yield a sentence for each folder with too many modules."""
    count: dict[Path, int] = defaultdict(int)
    for file in read_modules(package).values():
        count[file.parent] += 1
    for folder, modules in count.items():
        if modules > MODULES_OF_A_FOLDER:
            place = folder.relative_to(package.parent)
            yield f"{place} has {modules} modules, {MODULES_OF_A_FOLDER} are allowed: split it"


def small_modules(package: Path) -> Iterator[str]:
    """Yield a sentence for each short module that only one other imports."""
    modules, users = read_modules(package), defaultdict(set)
    for file in sorted(package.rglob("*.py")):
        for name in imported_by(file, package):
            users[name].add(file)
    for name, file in modules.items():
        lines = len(file.read_text().splitlines())
        others = users[name] - {file}
        if lines < LINES_OF_A_MODULE and len(others) == 1 and file.stem != "__main__":
            short, user = (each.relative_to(package.parent) for each in (file, *others))
            yield f"{short} has {lines} lines and one user: move it into {user}"


def large_classes(package: Path) -> Iterator[str]:
    """Yield a sentence for each class with too many methods, private ones counted."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                methods = sum(isinstance(each, functions) for each in node.body)
                if methods > METHODS_OF_A_CLASS:
                    place = file.relative_to(package.parent)
                    yield f"{place}: {node.name} has {methods} methods, divide it"


def unnamed_modules(package: Path) -> Iterator[str]:
    """Yield a sentence for each module that the docstring of its folder does not name."""
    for file in read_modules(package).values():
        folder = file.parent / "__init__.py"
        if file.parent == package or file.stem == "__main__" or not folder.exists():
            continue
        about = ast.get_docstring(ast.parse(folder.read_text())) or ""
        if file.stem not in re.findall(r"\w+", about):
            yield f"{folder.relative_to(package.parent)} says nothing of {file.stem}"


def circles(package: Path) -> Iterator[str]:
    """Yield a sentence for a circle of imports, in functions too, but for those of types."""
    folders = package.rglob("*/__init__.py")
    files = {".".join(each.parent.relative_to(package.parent).parts): each for each in folders}
    imports: dict[str, set[str]] = {}
    for name, file in (files := {**files, **read_modules(package)}).items():
        found = files.keys() & {*imported_by(file, package, types_too=False)} - {name}
        # What a module lies in is imported before it, whether it says so or not.
        imports[name] = {each for each in found if not name.startswith(f"{each}.")}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as exc:
        yield f"{' imports '.join(reversed(exc.args[1]))}: move what both need"


def long_files(package: Path) -> Iterator[str]:
    """Yield a hint for each file that has grown long."""
    for file in sorted(package.rglob("*.py")):
        lines = len(file.read_text().splitlines())
        if lines > LINES_OF_A_HINT:
            yield f"{file.relative_to(package.parent)} has {lines} lines, {LINES_OF_A_HINT} is long"


RULES = [crowded_folders, small_modules, large_classes, unnamed_modules, circles]


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_to_its_sizes(rule: Rule) -> None:
    assert list(rule(ROOT / "mcp_sandbox")) == []


def lay_out(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "house"


FULL = {f"room/m{number}.py": "" for number in range(MODULES_OF_A_FOLDER)}
METHODS = "".join(f"    def m{number}(self): ...\n" for number in range(METHODS_OF_A_CLASS))


@pytest.mark.parametrize(
    ("rule", "files", "complaint"),
    [
        (
            crowded_folders,
            {**FULL, "room/one_more.py": ""},
            "house/room has 13 modules, 12 are allowed: split it",
        ),
        (
            small_modules,
            {"tiny.py": "x = 1\n", "user.py": "from house.tiny import x\n"},
            "house/tiny.py has 1 lines and one user: move it into house/user.py",
        ),
        (
            small_modules,
            {"room/tiny.py": "x = 1\n", "user.py": "from house.room import tiny\n"},
            "house/room/tiny.py has 1 lines and one user: move it into house/user.py",
        ),
        (
            large_classes,
            {"big.py": f"class Big:\n{METHODS}    async def _one_more(self): ...\n"},
            "house/big.py: Big has 26 methods, divide it",
        ),
        (
            unnamed_modules,
            {"room/__init__.py": '"""Has walls."""\n', "room/wall.py": "", "room/walls.py": ""},
            "house/room/__init__.py says nothing of wall",
        ),
        (
            circles,
            {
                "a.py": "from house.room import b\n",
                "room/b.py": "def late():\n    from house.a import x\n",
            },
            "house.a imports house.room.b imports house.a: move what both need",
        ),
    ],
    ids=["folder", "module", "module-by-its-folder", "class", "docstring", "circle"],
)
def test_planted_violation_is_told(
    tmp_path: Path, rule: Rule, files: Mapping[str, str], complaint: str
) -> None:
    assert list(rule(lay_out(tmp_path, files))) == [complaint]


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (crowded_folders, {**FULL, "room/__init__.py": ""}),
        (
            small_modules,
            {
                "tiny.py": "x = 1\n",
                "a.py": "from house.tiny import x\n",
                "b.py": "import house.tiny\n",
                "grown.py": "x = 1\n" * LINES_OF_A_MODULE,
                "c.py": "from house import grown\n",
                "unused.py": "",
            },
        ),
        (large_classes, {"big.py": f"class Big:\n{METHODS}"}),
    ],
    ids=["folder", "module", "class"],
)
def test_what_is_just_allowed_is_not_told(
    tmp_path: Path, rule: Rule, files: Mapping[str, str]
) -> None:
    assert list(rule(lay_out(tmp_path, files))) == []


if __name__ == "__main__":
    for folder in ("mcp_sandbox", "tests", "benchmarks"):
        for hint in long_files(ROOT / folder):
            print(f"hint: {hint}")
