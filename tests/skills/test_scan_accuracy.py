"""How much of what made-up skills need is found, and how much of what is found they need.

Each skill is put together at random from pieces that need something, and from others that only
look as if they did. The table of the results is printed (`pytest -s`).
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from mcp_sandbox.skills.needs.findings import scan

SKILLS = 200

PYTHON_NEEDS = (
    "import {m}\n",
    "import os, {m} as z\n",
    "from {m}.inner import (\n    a,\n    b,  # two\n)\n",
    "if True:\n    def f():\n        from {m} import x; return x\n",
    "try:\n    import {m}\nexcept ImportError as e:\n    print('no', e)\n    raise SystemExit(1)\n",
    "class A:\n    '''Text.'''\n    def b(self):\n        import {m}\n",
)
PYTHON_COMMANDS = (
    "import subprocess\nsubprocess.run(['{c}', '-v', path], check=True)\n",
    "import subprocess as sp\nout = sp.check_output(\n    ['{c}', *args]\n)\n",
    "import os\nos.system(f'{c} {{x}} > /dev/null')\n",
    "cmd = ['{c}', str(a)]\ncmd += more\nsubprocess.Popen(cmd)\n",
    "subprocess.run('cat x | {c} -', shell=True)\n",
)
PYTHON_DECOYS = (
    '"""\nimport {d}\nsubprocess.run(["{d}"])\n"""\n',
    "# import {d}\n",
    "text = 'import {d}; os.system(\"{d}\")'\n",
    "try:\n    import {d}\nexcept ImportError:\n    {d} = None\n",
    "print(f'{{x}} run {d} y')\n",
    "parser.add_argument('--{d}')\n{d} = 1\n{d}.run(['a'])\n",
)
SHELL_NEEDS = (
    '{c} --flag "$1" | sort\n',
    "if ! command -v {c} >/dev/null 2>&1; then\n  echo no >&2\n  exit 1\nfi\n",
    'for f in *.x; do\n  A=b {c} "$f" || true\ndone\n',
    'x="$(echo "a $({c} y)" | sort)"\n',
    'run() {{\n  local q=1\n  {c} "$q"\n}}\nrun\n',
    'case "$1" in\n  go) {c} ;;\n  *) sort x ;;\nesac\n',
    "find . -name '*.y' | xargs -n1 {c}\n",
    "sudo -u me env K=v {c} <<'END'\nsome text\nEND\n",
)
SHELL_DECOYS = (
    "# {d} x\n",
    "echo \"run {d} first\" '| {d}'\n",
    "cat <<EOF\n{d} is not run\nEOF\n",
    "if command -v {d} >/dev/null; then {d} x; else sort x; fi\n",
    "{d}() {{ :; }}\n{d}\n",
    "{d}=1; echo $\u007b{d}\u007d\n",
    "list=(a {d}\n  {d})\n",
    "[[ $x == {d} || $y =~ {d} ]] && sort x\n",
)
NODE_NEEDS = (
    "import a from '{n}';\n",
    'const {{ b }} = require("{n}/deep");\n',
    'import {{\n  c,\n}} from "{n}";\n',
    "async function q() {{ const z = await import('{n}'); }}\n",
)
NODE_DECOYS = (
    "// import x from '{d}'\n",
    "/* require('{d}') */\n",
    "const s = \"require('{d}')\";\n",
    "import type {{ T }} from '{d}';\n",
    "import local from './{d}';\n",
)


@dataclass
class Score:
    """What was to be found, what was, and what was not to be."""

    right: int = 0
    missed: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])

    def row(self, name: str) -> str:
        found, real = self.right + len(self.wrong), self.right + len(self.missed)
        return f"{name:10} {real:6} {found:6} {self.right / found:10.3f} {self.right / real:8.3f}"


def made(chance: random.Random, needs: Sequence[str], decoys: Sequence[str], **names: str) -> str:
    pieces = [chance.choice(needs), *chance.sample(decoys, 3)]
    chance.shuffle(pieces)
    return "".join(piece.format(**names) for piece in pieces)


def test_what_scripts_need_is_found_and_little_else() -> None:
    chance, number = random.Random(7), count()
    scores = {"python": Score(), "command": Score(), "node": Score()}
    for _ in range(SKILLS):
        m, c, n, d = (f"{letter}{next(number)}zz" for letter in "mcnd")
        kind = chance.choice(list(scores))
        if kind == "python":
            both = (PYTHON_NEEDS, PYTHON_COMMANDS)
            text = made(chance, both[0], PYTHON_DECOYS, m=m, d=d)
            text += made(chance, both[1], PYTHON_DECOYS, c=c, d=d)
            files, expected = {"scripts/a.py": text}, {("python", m), ("command", c)}
        elif kind == "node":
            text = made(chance, NODE_NEEDS, NODE_DECOYS, n=n, d=d)
            files, expected = {"scripts/a.mjs": text}, {("node", n)}
        else:
            text = made(chance, SHELL_NEEDS, SHELL_DECOYS, c=c, d=d)
            files, expected = {"scripts/a.sh": text}, {("command", c)}
        _judge(scores, files, expected)
    rows = [score.row(name) for name, score in scores.items()]
    sys.stdout.write("\n".join(["\nkind       needed  found  precision   recall", *rows, ""]))
    assert {name: (score.missed, score.wrong) for name, score in scores.items()} == {
        name: ([], []) for name in scores
    }


def _judge(scores: dict[str, Score], files: dict[str, str], expected: set[tuple[str, str]]) -> None:
    _, needs = scan({path: text.encode() for path, text in files.items()})
    # Of the names only those that are made up are of interest.
    found = {
        (each.kind, each.name) for each in needs if each.weight != "optional" and "zz" in each.name
    }
    for kind, name in expected & found:
        assert name
        scores[kind].right += 1
    for kind, name in expected - found:
        scores[kind].missed.append(f"{name}:\n{files}")
    for kind, name in found - expected:
        scores[kind].wrong.append(f"{name}:\n{files}")
