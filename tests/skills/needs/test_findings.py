"""What the reading of scripts finds, held against Python's own parser and against written texts."""

import ast
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sandbox.skills.needs.findings import MAX_FILE_BYTES, scan
from mcp_sandbox.skills.needs.python import NAMESPACES, read_python
from mcp_sandbox.skills.needs.uses import Requirement


def needs_of(**files: str) -> dict[tuple[str, str], str]:
    """The weight of every need, by its kind and name; `_` in a file's name is its dot."""
    _, needs = scan({name.replace("_", "."): text.encode() for name, text in files.items()})
    return {(each.kind, each.name): each.weight for each in needs}


def modules(text: str) -> dict[str, str]:
    found = needs_of(a_py=text)
    return {name: weight for (kind, name), weight in found.items() if kind == "python"}


def commands(text: str) -> dict[str, str]:
    found = needs_of(a_sh=text)
    return {name: weight for (kind, name), weight in found.items() if kind == "command"}


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.whole)])
def test_python_imports_are_those_that_pythons_own_parser_sees(every: int) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [*folder.glob("*.py"), *(folder / "asyncio").glob("*.py")]
    wrong, seen = {}, 0
    for path in sorted(files)[::every]:
        data = path.read_bytes()
        if len(data) <= MAX_FILE_BYTES:
            text = data.decode("utf-8", "replace")
            expected = set(_imports(ast.parse(text)))
            found = {use.name for use in read_python(text).needs if use.kind == "python"}
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
            assert node.module not in NAMESPACES
            yield node.module.split(".")[0]


def test_imports_in_functions_and_branches_are_needed_sometimes() -> None:
    text = """
import requests
def f():
    import torch
if x:
    import scipy
class A:
    import numpy
with y: import yaml
"""
    weights = modules(text)
    assert weights.pop("requests") == weights.pop("numpy") == weights.pop("yaml") == "always"
    assert set(weights.values()) == {"sometimes"}


@pytest.mark.parametrize(
    ("handler", "weight"),
    [
        ("except ImportError:\n    rich = None", "optional"),
        ("except (ValueError, ModuleNotFoundError) as e:\n    pass", "optional"),
        ("except:\n    pass", "optional"),
        ("except ImportError: rich = None", "optional"),
        ("except ImportError:\n    print('pip install rich')\n    sys.exit(1)", "always"),
        ("except ImportError:\n    raise SystemExit('no')", "always"),
        ("except ValueError:\n    pass", "always"),
    ],
)
def test_a_guarded_import_is_optional_unless_the_handler_ends_the_program(
    handler: str, weight: str
) -> None:
    assert modules(f"try:\n    import rich\n{handler}\n")["rich"] == weight


def test_what_takes_the_place_of_a_missing_module_is_needed_without_it_only() -> None:
    text = b"try:\n    import tomllib\nexcept ImportError:\n    import tomli as tomllib\n"
    _, needs = scan({"a.py": text})
    assert Requirement("python", "tomli", "always", "tomllib", ("a.py",)) in needs


def test_imports_in_texts_comments_and_for_types_do_not_count() -> None:
    text = '''
"""
import alpha
"""
# import beta
x = 'import gamma'
if TYPE_CHECKING:
    import delta
from . import epsilon
from .zeta import eta
y = f"{x!r} import theta"
'''
    assert modules(text) == {}


def test_modules_of_the_skill_itself_are_no_packages() -> None:
    files = {
        "scripts/main.py": b"import helpers\nfrom lib.pdf import merge\nimport pypdf\n",
        "scripts/helpers.py": b"",
        "scripts/lib/pdf.py": b"",
    }
    _, needs = scan(files)
    assert [each.name for each in needs if each.kind == "python"] == ["pypdf"]


def test_programs_that_python_starts_are_found() -> None:
    text = """
import subprocess, os, shutil
subprocess.run(["pandoc", "-o", out])
cmd = ["ffmpeg", "-i", path]
subprocess.check_call(cmd)
subprocess.run(f"pdftotext {path} -", shell=True)
os.system("convert a b | tesseract stdin out")
if shutil.which("qpdf"):
    subprocess.run(["qpdf", "--check"])
subprocess.run([sys.executable, "-m", "pip"])
client.run("nothing")
pattern.call(["nothing"])
"""
    found = {name: w for (kind, name), w in needs_of(a_py=text).items() if kind == "command"}
    assert found == {
        "pandoc": "always",
        "ffmpeg": "always",
        "pdftotext": "always",
        "convert": "always",
        "tesseract": "always",
        "qpdf": "sometimes",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("curl -s x | jq . && tar xf y; wc -l &\n", {"curl", "jq", "tar", "wc"}),
        ("# pandoc\necho pandoc 'pandoc; pandoc' \"pandoc\"\n", set()),
        ("cat <<EOF\npandoc x\nEOF\nls\n", {"cat", "ls"}),
        ("cat <<-'EOF' | sort\n\tpandoc x\n\tEOF\nls\n", {"cat", "sort", "ls"}),
        ('x=$(date +%s) y=`uname -s` z="$(whoami)"\n', {"date", "uname", "whoami"}),
        ("f() { grep x; }\nfunction g { sed y; }\nf; g\n", {"grep", "sed"}),
        ("alias ll='ls -l'\nll\n", set()),
        ("for f in a b; do file $f; done; while read l; do wget $l; done\n", {"file", "wget"}),
        ("case $1 in\n a|b) rsync x ;;\n *) scp y ;;\nesac\ntree\n", {"rsync", "scp", "tree"}),
        ("if [[ $a && -f b ]] || (( i > 2 )); then bc; fi\n", {"bc"}),
        ("a=(one two\n three)\nb+=(four)\nxxd\n", {"xxd"}),
        ("diff <(sort a) <(uniq b) > out 2>&1\n", {"diff", "sort", "uniq"}),
        ("A=1 env B=2 timeout -k 1 5 nice -n 3 ffmpeg x\n", {"env", "timeout", "nice", "ffmpeg"}),
        ("bash -c 'dot x | gs y'\neval \"zip a\"\n", {"bash", "dot", "gs", "zip"}),
        ("find . -name x -exec identify {} +\n", {"find", "identify"}),
        ('./own.sh; $TOOL x; ${A:-b} c; "$D/bin" e; ../up\n', set()),
        ("/usr/bin/perl x; exec node y\n", {"perl", "node"}),
        ("for ((i=0; i<3; i++)); do openssl rand; done\n", {"openssl"}),
        ("echo ${x:-$(hostname)} $((1 + $(nproc)))\n", {"hostname", "nproc"}),
    ],
)
def test_commands_are_found_as_bash_would_run_them(text: str, expected: set[str]) -> None:
    assert set(commands(f"#!/bin/zsh\n{text}")) - {"zsh"} == expected


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("command -v jq >/dev/null 2>&1 || { echo no >&2; exit 1; }\n", "always"),
        ("if ! command -v jq &> /dev/null; then\n  echo no\n  exit 1\nfi\n", "always"),
        ("which jq || die 'no jq'\n", "always"),
        ("if command -v jq; then jq . x; else cat x; fi\n", "optional"),
        ("command -v jq && jq . x\n", "optional"),
        ("jq . x\n", "always"),
    ],
)
def test_a_command_that_is_looked_for_first_is_optional_unless_its_lack_ends_the_script(
    text: str, weight: str
) -> None:
    assert commands(text)["jq"] == weight


def test_python_in_a_shell_script_is_read_as_python() -> None:
    text = "python3 - <<'EOF'\nimport pandas\nEOF\npython3 -c 'import yaml'\npython -m pytest\n"
    found = {name for kind, name in needs_of(a_sh=text) if kind == "python"}
    assert found == {"pandas", "yaml", "pytest"}


def test_javascript_packages_are_found_and_nodes_own_modules_are_not() -> None:
    text = r"""
// import a from "commented";
import fs from "node:fs";
import path from 'path';
import { Document } from "docx";
import type { T } from "only-types";
import x from "./local.js";
const sharp = require("sharp"), sub = require('@scope/pkg/deep');
const lazy = await import("playwright");
const s = "import z from 'text'", r = /["']require("regex")/;
const { execSync, spawn } = require("child_process");
execSync(`pandoc ${a} -o b`);
spawn("soffice", ["--headless"]);
/re/.exec("nothing here");
"""
    found = needs_of(a_js=text)
    assert {name: w for (kind, name), w in found.items() if kind == "node"} == {
        "docx": "always",
        "sharp": "always",
        "@scope/pkg": "always",
        "playwright": "sometimes",
    }
    assert {name for kind, name in found if kind == "command"} == {"pandoc", "soffice"}


def test_declared_requirements_and_shebangs_count() -> None:
    block = """#!/usr/bin/env -S uv run --script
# /// script
# dependencies = [
#   'rich>=13',
#   'Foo_Bar',
# ]
# ///
"""
    found = needs_of(a_py=block, requirements_txt="requests>=2\n# x\n-r other\n")
    assert found == {
        ("command", "uv"): "always",
        ("distribution", "rich"): "always",
        ("distribution", "foo-bar"): "always",
        ("distribution", "requests"): "always",
    }


def test_the_text_of_a_skill_counts_with_its_code_blocks_only() -> None:
    text = """---
name: x
---
Run pandoc.
```bash
$ qpdf --check x
no problem found
```
```python
import pypdf
```
```
tesseract
```
"""
    _, needs = scan({"SKILL.md": text.encode()})
    assert [(each.name, each.weight) for each in needs] == [
        ("qpdf", "sometimes"),
        ("pypdf", "sometimes"),
    ]


def test_the_manifest_tells_hosts_variables_packages_and_writes() -> None:
    files = {
        "scripts/a.py": b"""
import os, requests
# https://in.a.comment.org
URL = "https://api.acme.io/v1"
NS = "http://schemas.openxmlformats.org/x"
key = os.environ["ACME_KEY"]; other = os.getenv('OTHER'); os.environ.get("THIRD", "")
open("/etc/acme.conf", "w"); open("/etc/hosts"); open("out.txt", "w")
""",
        "scripts/b.sh": b"""
curl -H "x: $ACME_TOKEN" https://user@cdn.acme.io:8443/f > ~/f
LOCAL=1
echo $LOCAL $HOME
""",
        "scripts/c.js": b"""
fetch(`https://${x}.dyn.io/`, process.env.NODE_KEY)
fetch('wss://ws.acme.io')
""",
    }
    findings, _ = scan(files)
    assert findings.hosts == ("api.acme.io", "cdn.acme.io", "ws.acme.io")
    assert findings.variables == ("ACME_KEY", "ACME_TOKEN", "NODE_KEY", "OTHER", "THIRD")
    assert findings.packages == ("requests",)
    assert findings.commands == ("bash", "curl", "node", "python3")
    assert findings.writes == ("/etc/acme.conf", "~/f")


def test_what_is_too_large_is_said_not_to_be_read() -> None:
    findings, needs = scan({"big.py": b"import x\n" * 40_000, "small.py": b"import y\n"})
    assert findings.unread == ("big.py",)
    assert [each.name for each in needs if each.kind == "python"] == ["y"]


_HOSTILE = [
    "a<<x;",
    "(", "$(", "${", "`", "'", '"$(', "\\", "a=(", "case x in ", "$((", "<", "a|", '"${a:-',
    '"""a', "'\\", "f'{", "import a,", "try:\n", "x=['a',", "run([", "/*", "=/[", "```bash\n",
    "# /// script\n", "import ", "run('a',", "\\\n", "http://", "from x import ", "x('a'", "[[ ",
    "import x from ", "{", "\0", "http://a.", "env ", "eval '", "a:\n", "\t", "<<'", "((", "@a/",
    "find -exec ", "type ", "command -v a || ", "function ", "x() {", "!", "esac ", "a=1 ",
]  # fmt: skip


def test_damaged_texts_are_read_as_far_as_they_make_sense() -> None:
    chance = random.Random(11)
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    for _ in range(150):
        begin = chance.choice(sources)
        text = begin[: chance.randrange(6000)]
        for _ in range(chance.randrange(20)):
            at = chance.randrange(len(text) + 1)
            piece = chance.choice([*_HOSTILE, "", text[at : at + 40]])
            text = text[:at] + piece + text[at + chance.randrange(30) :]
        for name in ("a.py", "a.sh", "a.ts", "SKILL.md", "package.json", "requirements.txt"):
            scan({name: text.encode("utf-8", "surrogatepass")})


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["a.py", "a.sh", "a.js", "SKILL.md", "requirements.txt"])
def test_hostile_texts_take_no_longer_than_their_length(suffix: str) -> None:
    slow = {}
    for piece in _HOSTILE:
        fence = "```bash\n" if suffix == "SKILL.md" else ""
        text = fence + piece * (20_000 // len(piece))
        began = time.process_time()
        scan({suffix: text.encode()})
        took = time.process_time() - began
        # Ten times what it takes; what grows with the square takes a hundred times as long.
        if took > 1.5:
            slow[piece] = took
    assert slow == {}
