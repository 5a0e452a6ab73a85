"""What our script says of a skill is what the strictest readers say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sandbox.skills.validate import examine
from tests.shipped.texts import SHIPPED
from tests.skills import corpus

VALIDATE = SHIPPED / "skill-authoring/scripts/validate_skill.py"

# Valid, but the script wants `key: value`.
REFUSED_HERE_ALONE = "\n  ? a\n  : b"
# The reference tool takes these words for what older YAML meant by them.
REFUSED_BY_THE_TOOL_ALONE = ("=", "<<")
VALUES = (
    "a", "'a'", '"a"', "a: b", "a:b", "a:", "a # b", "a#b", "# a", "[a]", "{a: b}", "&a b", "*a",
    "!a b", "!!str a", "|\n  a\n  b", ">-\n  a\n\n  b", "|2\n    a", "|x\n  a", ">\n a", "|-\nb",
    "'a\n  b'", '"a\nb"', "'a", '"a\\x41"', '"\\q"', "'it''s'", "'a' b", '"a"#b', "@a", "`a`",
    "%a", ",a", "]", "- a", "-a", "? a", "?a", "a\tb", "'a\tb'", "\ta", "a\n  b", "a\n b: c",
    "a\n  # c\n  b", "null", "~", "yes", "3000", "", "-", "a --- b", "'a --- b'", "...", "=",
    "<<", "é", "\u200b", "\ufeff", "\x85", "\u2028", "a\\", "a'b", "a''", "\n  a", "\n  - a",
    "\n- a", "\n  a: b", "\n  a: b\n  c: d", "\n  a: b\n   c: d", "\n  a: b\n  a: c",
    "\n  - a: b\n    c: d", "\n    - a\n  - b", "\n  <<: a", "\n  ? a\n  : b",
    "\n  a:\n    b: c\n  d:\n   e: f", "\n  'a': b", '\n  "a" : b', "\n  a : b", "\n\n  a",
    "\n  # c\n  a", "\n\t- a", "\n  - [a]", "\n  - - a", "a\nname: b", "a\nlicense:", "a\n\n\n",
    "a\n...", "a\nno field", "a\n  - b", "d" * 1024, "d" * 1025, REFUSED_HERE_ALONE,
)  # fmt: skip


def verdicts(folders: list[Path]) -> dict[str, bool]:
    """What the script says of each, run alone and as a user runs it."""
    done = subprocess.run(
        [sys.executable, "-B", VALIDATE, "--json", *folders],
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in reports:
        worst = {problem["level"] for problem in report["problems"]}
        assert report["valid"] == ("error" not in worst)
        assert all(problem["text"] and problem["line"] > 0 for problem in report["problems"])
    return {Path(report["folder"]).name: report["valid"] for report in reports}


def test_its_verdicts_on_the_corpus_are_the_strict_ones(tmp_path: Path) -> None:
    corpus.write(tmp_path)
    folders = sorted(tmp_path.iterdir())
    said = verdicts(folders)
    assert len(said) > 150
    wrong = [
        each.name for each in folders if said[each.name] == examine(each, strictly=True).faulty
    ]
    assert wrong == []


@pytest.mark.parametrize("field", ["description", "metadata", "compatibility"])
def test_its_verdicts_on_odd_yaml_are_the_strict_ones(tmp_path: Path, field: str) -> None:
    folders = dict[Path, str]()
    for number, value in enumerate(VALUES):
        if value in REFUSED_BY_THE_TOOL_ALONE:
            continue
        folder = tmp_path / f"s{number}"
        folder.mkdir()
        rest = "" if field == "description" else "description: Does it.\n"
        text = f"---\nname: s{number}\n{rest}{field}: {value}\n---\nbody\n"
        (folder / "SKILL.md").write_text(text, encoding="utf-8")
        folders[folder] = text
    said = verdicts(list(folders))
    wrong = [
        text
        for each, text in folders.items()
        if said[each.name] == examine(each, strictly=True).faulty
    ]
    assert [text for text in wrong if REFUSED_HERE_ALONE not in text] == []
