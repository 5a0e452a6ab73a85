"""The shipped skills are what a newcomer copies: their form is right."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import frontmatter
import pytest

from mcp_sandbox.skills.validate import examine
from tests.shipped.texts import NAMES, SHIPPED

FILES = sorted(path for path in SHIPPED.rglob("*") if path.is_file() and path.suffix != ".pyc")
SCRIPTS = [path for path in FILES if path.suffix == ".py"]


def test_there_are_five() -> None:
    assert NAMES == [
        "code-review",
        "python-data-analysis",
        "skill-authoring",
        "using-this-sandbox",
        "web-page-preview",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_to_the_strictest_reader_and_to_our_own_script(name: str) -> None:
    assert not examine(SHIPPED / name, strictly=True).faulty
    script = SHIPPED / "skill-authoring/scripts/validate_skill.py"
    done = subprocess.run(
        [sys.executable, "-B", script, name],
        check=False,
        cwd=SHIPPED,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{name}: valid\n", "", 0)


@pytest.mark.parametrize("name", NAMES)
def test_its_texts_are_short_and_say_when_to_use_it(name: str) -> None:
    skill = frontmatter.load(str(SHIPPED / name / "SKILL.md"))
    description = str(skill["description"])
    assert re.search(r"\bUse (when|at|whenever)\b", description)
    assert len(description) < 500
    assert skill["license"] == "Apache-2.0"
    assert len(skill.content.splitlines()) < 200
    assert len(skill.content) < 8000


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_named_where_it_is_needed(name: str) -> None:
    """References lie one level deep, and `SKILL.md` sends the agent to each."""
    body = (SHIPPED / name / "SKILL.md").read_text(encoding="utf-8")
    for path in (path for path in FILES if path.is_relative_to(SHIPPED / name)):
        inside = path.relative_to(SHIPPED / name)
        assert len(inside.parts) <= 2
        if inside.parts[0] in ("references", "scripts") and not is_module(path):
            assert path.name in body, inside


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_run_on_the_oldest_python_and_explain_themselves(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 9))
    assert "noqa" not in re.sub(r'r".*?"', "", source)
    if is_module(path):
        return
    assert source.startswith("#!/usr/bin/env python3\n")
    done = subprocess.run(
        [sys.executable, "-B", path, "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert "Exit codes: 0 =" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-B", path, "--no-such-option"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert wrong.returncode == 2


def is_module(path: Path) -> bool:
    """Not run by itself, but used by the scripts beside it, which are named."""
    return path.suffix == ".py" and "__main__" not in path.read_text(encoding="utf-8")
