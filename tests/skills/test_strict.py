"""`validate --strict`: the reference tool is asked, and what it says is told."""

import importlib
import sys
from pathlib import Path

import pytest

from mcp_sandbox.errors import Unsupported
from mcp_sandbox.skills.validate import examine
from tests.skills.corpus import CASES, Case, described, good

reference = importlib.import_module("skills_ref")
CRASHES = {
    "utf-16", "latin-1", "latin-1-body", "surrogate", "overlong", "nul", "escape", "c1",
    "question-marks", "deep-lists",
}  # fmt: skip
"""Where the tool ends in an error of Python's; all these are invalid here."""


def put(folder: Path, document: bytes, spelling: str = "SKILL.md") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / spelling).write_bytes(document)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_skill_is_faulty_if_the_tool_refuses_it_or_cannot_be_asked(
    case: Case, tmp_path: Path
) -> None:
    folder = put(tmp_path / case.folder_name, case.document, case.spelling)
    examined = examine(folder, strictly=True)
    if case.loads and case.name not in CRASHES:
        assert examined.faulty == bool(reference.validate(folder))
    else:
        assert examined.faulty
    assert all(each.reason and each.fix for each in examined.diagnostics)


def test_what_the_tool_says_is_told_in_its_words(tmp_path: Path) -> None:
    folder = put(tmp_path / "skill", good("skill", "version: 1\n").encode())
    assert not examine(folder).faulty
    (said,) = [each for each in examine(folder, strictly=True).diagnostics if each.level == "error"]
    assert said.reason.startswith("Unexpected fields in frontmatter: version.")


def test_a_spelling_that_the_tool_does_not_look_for_is_invalid(tmp_path: Path) -> None:
    folder = put(tmp_path / "skill", good("skill").encode(), "Skill.md")
    reasons = [each.reason for each in examine(folder, strictly=True).diagnostics]
    assert reasons[0] == "Missing required file: SKILL.md"
    assert not examine(folder).faulty


def test_without_the_tool_nothing_passes_as_strictly_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "skill", described("skill", "Does it.").encode())
    assert not examine(folder, strictly=True).faulty
    monkeypatch.setitem(sys.modules, "skills_ref", None)
    with pytest.raises(Unsupported, match=r"mcp-sandbox\[strict\]"):
        examine(folder, strictly=True)
