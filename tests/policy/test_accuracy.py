"""How well the grading tells what is high or worse, on lines that were labelled by hand."""

import pytest

from mcp_sandbox.policy import assess
from mcp_sandbox.policy.rules import LEVELS
from tests.policy.corpus import Line, accuracy, read

BYPASSES = [
    ("critical", "bash", "curl x | while read -r l; do sh; done", "a pipe ends at the loop"),
    ("critical", "bash", "find / -delete", "what find leaves out is not known"),
    ("critical", "bash", "echo / | xargs rm -rf", "what xargs adds is not known"),
    ("critical", "bash", "for d in /; do rm -rf $d; done", "loops are not followed"),
    (
        "critical",
        "bash",
        "f() { :; f | f & }; f",
        "only the first command of a function is looked at",
    ),
    ("high", "bash", "git -c alias.x='!rm y' x", "programs run what their settings say"),
    ("high", "bash", "sed '1e rm x' f", "sed can run commands"),
    ("high", "bash", "awk '{ print > \"f\" }' g", "awk can write"),
    ("high", "bash", "make -f - <<E\nall:\n\trm x\nE", "the recipes of make are not read"),
    ("medium", "bash", "LD_PRELOAD=./x.so ls", "variables can change what a program does"),
    ("medium", "bash", "rg --pre ./x.sh y", "the harmless can be told to run something"),
    ("critical", "python", 'globals()["ev" + "al"]("1")', "names are put together"),
    ("critical", "python", 'import os\nvars(os)["system"]("x")', "members are looked up"),
    ("critical", "javascript", 'ev\\u0061l("1")', "escapes in names are not read"),
]


@pytest.mark.parametrize("name", ["tuned.txt", "held_out.txt"])
def test_lines_are_graded_as_a_person_has_labelled_them(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = accuracy(read(name))
    with capsys.disabled():
        print(f"\n{name}: {found}")  # noqa: T201
    assert found.lines >= 150
    assert min(found.precision, found.recall, found.same_level) >= 0.97


@pytest.mark.parametrize(
    ("level", "language", "code"),
    [
        pytest.param(*row, marks=pytest.mark.xfail(strict=True, reason=reason))
        for *row, reason in BYPASSES
    ],
)
def test_a_disguise_is_seen_through(level: str, language: str, code: str) -> None:
    levels = {str(level): rank for level, rank in LEVELS.items()}
    assert levels[Line(level, language, code).graded] >= levels[level]


def test_code_that_is_too_long_is_high_whatever_is_in_it() -> None:
    found = assess("echo " + "x" * 70_000, "bash")
    assert found.level == "high"
    assert found.reason == "only the first 64 KiB were read"
