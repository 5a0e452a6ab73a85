"""Kinds of calls by which people and agents were misled: names, text, code, and what they mean."""

from tests.e2e.stumbles.judging import Step, run

_SPAWN = """\
import inspect, multiprocessing
from pathlib import Path

def double(number):
    return 2 * number

if __name__ == "__main__":
    (Path(__file__).parent / "beside.txt").write_text("beside")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]), "return 2" in inspect.getsource(double))
"""

NAMES = (
    run("seq 1 9000", "9000"),
    run("ls -A | grep -c mcp-sandbox; git init -q ~/kinds", "^0$"),
    run("mkdir -p kinds && cd kinds && git clone -q ~/kinds . 2>&1; ls -A", r"\.git"),
    run("mkdir -p 'app/[id]' app/pkg pnpm && echo needle | tee 'app/[id]/page.tsx' app/pkg/a.js"),
    run("ln -s ../app/pkg pnpm/linked && ls pnpm", "linked"),
    Step("glob", {"pattern": "app/[id]/page.tsx"}, [r"^app/\[id\]/page.tsx$"]),
    Step("glob", {"pattern": "pnpm/linked/*.js"}, ["a.js"]),
    Step("glob", {"pattern": "app/pkg"}, ["is a directory"]),
    Step("glob", {"pattern": "[0-9]*.kind"}, [r"write \\\["]),
    Step("grep", {"pattern": "needle", "glob": "app/[id]/*"}, ["page.tsx:1:needle"]),
    Step("grep", {"pattern": r"nothing\|needle", "path": "app"}, [r"nothing\|needle matches"]),
    Step("grep", {"pattern": r"\<needle\>", "path": "app/pkg"}, ["a.js:1:needle"]),
    run("printf 'one\\ntwo\\n' > two.txt && cat two.txt", "two"),
    Step("grep", {"pattern": r"one\ntwo", "path": "two.txt"}, ["two.txt:1:one"]),
    run("mkdir -p venv/lib && echo needle > venv/lib/a.py && ls venv", "lib"),
    Step("grep", {"pattern": "needle"}, ["venv/.* left out"], ["venv/lib/a.py"]),
    Step("grep", {"pattern": "needle", "path": "venv"}, ["a.py:1:needle"]),
    Step("write_file", {"path": "cafe\u0301.txt", "content": "one\n"}, ["caf"]),
    Step("read_file", {"path": "caf\u00e9.txt"}, ["one"]),
    Step("write_file", {"path": "data.json", "content": {"a": [1, 2]}}, ["JSON"]),
    run("cat data.json", '"a"'),
)

CODE = (
    Step("run_code", {"code": _SPAWN}, [r"^\[42\] True", "beside.txt"]),
    Step("read_file", {"path": "beside.txt"}, ["beside"]),
    run("for n in 1 2; do\r\n  mkdir -p dd$n\r\ndone\r\nls -d dd*\r\n", "^dd1$", "^dd2$"),
    Step(
        "run_code", {"code": "# -*- coding: latin-1 -*-\nprint('\u00e4\u00f6')"}, ["\u00e4\u00f6"]
    ),
    run("printf 'ERROR: disk\\r   \\n'; printf 'a\\rb\\r' > cr.txt; cat cr.txt", "ERROR: disk"),
    run("printf '\\033]8;;http://x/\\033\\\\link\\033]8;;\\033\\\\ ab\\bc\\n'", "^link ac$"),
    Step("exec", {"command": "gdb --version"}, ["is not installed: .*an image"], only="docker"),
    run("npm install -g --offline ./pkg 2>&1; npm prefix -g", r"\.local"),
    Step("exec", {"command": "read -p 'name? ' name < /dev/tty; echo $name"}, ["tty"]),
)

KINDS = (*NAMES, *CODE)
