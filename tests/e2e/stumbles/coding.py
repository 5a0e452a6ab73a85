"""The first half of an everyday session: a package, git, C, Node, and mistakes on the way."""

from tests.e2e.stumbles.judging import Step, fails, run

_SHAPES = '''\
"""Areas."""


def square(side):
    return side * 2


def circle(radius):
    return 3 * radius * radius
'''
_TESTS = """\
import unittest

from shapes import square


class Squares(unittest.TestCase):
    def test_area(self):
        self.assertEqual(square(3), 9)
"""
_TOML = (
    '[project]\nname = "shapes"\nversion = "0.1"\n\n[tool.setuptools]\npackage-dir = {"" = "src"}\n'
)

PACKAGE = (
    Step("sandbox_info", {}, ["python3", "none: "]),
    Step("list_files", {}, [r'"total": ?0']),
    Step("write_file", {"path": "pyproject.toml", "content": _TOML}, ["pyproject.toml"]),
    Step("write_file", {"path": "src/shapes.py", "content": _SHAPES}, ["src/shapes.py"]),
    Step("write_file", {"path": "tests/test_shapes.py", "content": _TESTS}, ["test_shapes"]),
    # What the calls before wrote is not of this one.
    fails("python -m pytest -q", "No module named '?pytest", never=["changed: "]),
    fails("PYTHONPATH=src python -m unittest discover -s tests", "6 != 9", "FAILED"),
    Step("read_file", {"path": "src/shapes.py"}, ["side \\* 2"]),
    Step("grep", {"pattern": "def \\w+"}, [r"src/shapes.py.*def square"]),
    Step("glob", {"pattern": "**/*.py"}, ["tests/test_shapes.py"]),
    Step(
        "edit_file",
        {"path": "src/shapes.py", "old": "     5\t    return side * 2", "new": "    return 1"},
        ["line number"],
        refused=True,
    ),
    Step(
        "edit_file",
        {"path": "src/shapes.py", "old": "def square(size):\n    return size * 2\n", "new": "x"},
        ["lines 4 to 5", "square"],
        refused=True,
    ),
    Step(
        "edit_file",
        {"path": "src/shapes.py", "old": "side * 2", "new": "side * side"},
        [r"^\+ +return side \* side"],
    ),
    run("python -m unittest discover -s tests", "OK", env={"PYTHONPATH": "src"}),
    run("printf 'a = 1\\r\\nb = 2\\r\\n' > windows.ini && wc -c windows.ini", "14"),
    Step("edit_file", {"path": "windows.ini", "old": "a = 1\nb = 2\n", "new": "a = 3\nb = 4\n"}),
    run("grep -c $'\\r$' windows.ini", "^2$"),
)

GIT = (
    run(
        "echo __pycache__ > .gitignore && git init -q -b main && "
        "git add -A .gitignore src tests pyproject.toml && git status -s",
        "A  src",
    ),
    run("git commit -m 'Add shapes'", "4 files changed"),
    run(
        "git switch -c pi && sed -i 's/3 \\* radius/3.14 * radius/' src/shapes.py && git diff",
        "3.14",
    ),
    run(
        "git commit -qam 'Take a better pi' && git switch -q main && git log --oneline",
        "Add shapes",
    ),
    run(
        "sed -i 's/3 \\* radius/22 \\/ 7 * radius/' src/shapes.py && git commit -am 'Take 22/7'",
        "1 file",
    ),
    fails("git merge pi", "CONFLICT", "src/shapes.py"),
    Step("grep", {"pattern": "^(<<<<<<<|=======|>>>>>>>)"}, ["src/shapes.py"]),
    Step(
        "run_code",
        {
            "code": "import re, pathlib\nfile = pathlib.Path('src/shapes.py')\n"
            "text = re.sub(r'<<<<<<<.*?=======\\n(.*?)>>>>>>>[^\\n]*\\n', r'\\1', "
            "file.read_text(), flags=re.S)\nprint(file.write_text(text))"
        },
        [r"^\d+", "src/shapes.py"],
    ),
    # These open an editor where nobody can type.
    run("git add -A src && git commit", "Merge branch 'pi'"),
    run("echo '# shapes' > README.md && git add README.md && git commit --amend", "Merge branch"),
    run("git -c color.ui=always log --graph --oneline", "Take a better pi"),
    run(
        "git switch -qc notes HEAD~1 && echo notes > README.md && git add README.md && "
        "git commit -m Notes",
        "1 file changed",
    ),
    fails("git rebase main", "CONFLICT|could not apply"),
    run(
        "echo both > README.md && git add README.md && git rebase --continue",
        "Successfully rebased",
    ),
    run(
        "echo more >> README.md && git stash && git status -s; git stash pop",
        "Saved working",
        "Dropped",
    ),
    run("git checkout -q -- . && git status --short", "windows.ini", never=["M README"]),
)

_HELLO = '#include <stdio.h>\nint main(void) { puts("hello from C"); return 0; }\n'
_MODULE = "export const area = (side) => side * side;\n"

NATIVE = (
    Step("write_file", {"path": "c/hello.c", "content": _HELLO}, ["hello.c"]),
    Step("write_file", {"path": "c/Makefile", "content": "hello: hello.c\n\tcc -o $@ $<\n"}),
    run("make && ./hello", "hello from C", cwd="c"),
    Step(
        "run_code",
        {"code": "int main() {}", "language": "c"},
        ["python, bash", "exec"],
        refused=True,
    ),
    Step("write_file", {"path": "web/area.mjs", "content": _MODULE}, ["area.mjs"]),
    Step(
        "run_code",
        {
            "code": "import { readFileSync } from 'node:fs';\nconst os = require('os');\n"
            "const { area } = await import('/workspace/web/area.mjs');\n"
            "console.log(area(4), readFileSync('pyproject.toml').length > 9, os.EOL.length);",
            "language": "javascript",
        },
        ["^16 true 1$"],
    ),
    fails("node web/none.mjs", "Cannot find module"),
    Step(
        "run_code",
        {"code": "const a = 1;\na.b.c;", "language": "javascript"},
        ["TypeError", "exit code 1"],
    ),
    Step("run_code", {"code": "let x = ;", "language": "javascript"}, ["SyntaxError"]),
)

MISTAKES = (
    Step("exec", {"command": "pwd", "cwd": None, "env": None, "timeout_s": None}, ["^/workspace$"]),
    Step("read_file", {"path": "src/shapes.py", "offset": "4", "limit": "1"}, ["def square"]),
    Step("read_file", {"path": "file:///workspace/src/shapes.py", "limit": None}, ["def square"]),
    Step("read_file", {"path": "'README.md'\n"}, ["notes|shapes|both"]),
    Step("read_file", {"path": "workspace/README.md"}, ["README.md"], refused=True),
    Step("run_code", {"code": "```python\nprint(6 * 7)\n```"}, ["^42$"]),
    Step("run_code", {"code": "total = 6 * 7\ntotal"}, ["print"]),
    Step("exec", {"command": "$ ls"}, ["prompt"]),
    Step("exec", {"cmd": "ls"}, ["command"], refused=True),
    Step("edit_file", {"path": "a", "old_string": "x", "new": "y"}, [r"\bold\b"], refused=True),
    Step("bash", {"command": "ls"}, ["exec"], refused=True),
    Step("exec", {"command": "ls", "timeout_s": 600_000}, ["millisecond"], refused=True),
    Step("read_file", {"path": "src/shape.py"}, ["did you mean .*shapes.py"], refused=True),
    Step(
        "skills_list", {"query": "merge two PDF files"}, ["without query lists all"], ["web-page"]
    ),
    Step("skill_activate", {"name": "PDF"}, ["code-review"], refused=True),
    Step("write_file", {"path": "/usr/x", "content": "x"}, never=["chmod"], refused=True),
)
