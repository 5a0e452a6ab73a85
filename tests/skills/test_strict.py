"""The strict verdict is that of the reference tool, wherever that comes to one."""

import importlib
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.skills.examine import examine
from mcp_sandbox.skills.strict import verdict
from tests.skills.corpus import CASES, Case, described, fields, good

reference = importlib.import_module("skills_ref")
# The tool needs minutes for these.
SLOW = {"keys-60000", "keys-1500", "list-2000", "brackets-lines"}
CRASHES: dict[str, type[Exception]] = {
    "utf-16": UnicodeDecodeError,
    "latin-1": UnicodeDecodeError,
    "latin-1-body": UnicodeDecodeError,
    "surrogate": UnicodeDecodeError,
    "overlong": UnicodeDecodeError,
    "nul": AttributeError,
    "escape": AttributeError,
    "c1": AttributeError,
    "question-marks": RecursionError,
    "deep-lists": RecursionError,
}
"""Where the tool ends in an error of Python's; all these are invalid here."""


def put(folder: Path, document: bytes, spelling: str = "SKILL.md") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / spelling).write_bytes(document)
    return folder


@pytest.mark.parametrize(
    "case", [each for each in CASES if each.name not in SLOW], ids=lambda case: case.name
)
def test_the_verdict_is_that_of_the_reference_tool(case: Case, tmp_path: Path) -> None:
    folder = put(tmp_path / case.folder_name, case.document, case.spelling)
    faults = verdict(case.document, case.folder_name, case.spelling)
    if case.name in CRASHES:
        with pytest.raises(CRASHES[case.name]):
            reference.validate(folder)
        assert faults
    else:
        assert bool(faults) == bool(reference.validate(folder))
    assert all(each.level == "error" and each.reason and each.fix for each in faults)


@pytest.mark.parametrize(
    "document",
    [
        described("skill", "'Does.'\t"),
        described("skill", "Does\tthis."),
        described("skill", "'Does\tthis.'"),
        described("skill", "|\n  Does\tthis.\n\t"),
        described("skill", "|\t\n  Does."),
        described("skill", "Does. # this\tis a comment"),
        described("skill", "Does.\t# a comment"),
        described("skill", "C#\tis."),
        described("skill", "Does\x85this."),
        described("skill", "Does\u2028this: that."),
        described("skill", "\u2029Does."),
        good("skill", "\ufeff"),
        described("skill", "Does --- this."),
        described("skill", "'Does --- this.'"),
        described("skill", "|\n" + f"  {'d' * 1023}"),
        described("skill", "|\n" + f"  {'d' * 1024}"),
        good("skill", "metadata:\n    a:\n      b: c\n    d:\n     e: f\n"),
        good("skill", "metadata:\n  <<:\n    a: b\n"),
        good("skill", "metadata:\n  '<<': a\n"),
        good("skill", "<<:\n  version: 1\n"),
        good("skill", "<<: a\n"),
        good("skill", "metadata:\n  1: a\n  1: b\n"),
        good("skill", "metadata:\n  1: a\n  '1': b\n"),
        good("skill", "metadata:\n  {{ a }}: b\n"),
        good("skill", "? license\n: MIT\n"),
        fields("<<:\n  name: skill\n  description: Does."),
    ],
)
def test_corners_of_the_yaml_are_as_the_reference_tool_has_them(
    document: str, tmp_path: Path
) -> None:
    folder = put(tmp_path / "skill", document.encode())
    assert bool(verdict(document.encode(), "skill")) == bool(reference.validate(folder))


PIECES = (
    ": ",
    ":",
    " #",
    "'",
    '"',
    "\t",
    "- ",
    "? ",
    "|\n",
    ">-",
    "&a ",
    "*a",
    "!x ",
    "[",
    "}",
    ",",
)
WORDS = ("---", "\n", "\n\n", "  ", "\n  ", "<<: ", "~", "\\", "a", "name: x", "1: 2\n", "é", "--")


@settings(derandomize=True, max_examples=150)
@given(st.integers(0, 90), st.lists(st.sampled_from(PIECES + WORDS), min_size=1, max_size=2))
def test_a_changed_document_is_judged_as_by_the_reference_tool(
    tmp_path_factory: pytest.TempPathFactory, at: int, pieces: list[str]
) -> None:
    whole = good("skill", "license: MIT\nmetadata:\n  author: me\n  'of': us\n")
    document = whole[:at] + "".join(pieces) + whole[at:]
    folder = put(tmp_path_factory.getbasetemp() / "changed" / "skill", document.encode())
    assert bool(verdict(document.encode(), "skill")) == bool(reference.validate(folder))


def test_an_entry_without_a_key_is_refused_though_the_reference_tool_reads_it(
    tmp_path: Path,
) -> None:
    document = good("skill", "metadata:\n  : a\n")
    folder = put(tmp_path / "skill", document.encode())
    assert reference.validate(folder) == []
    assert [each.code for each in verdict(document.encode(), "skill")] == ["yaml"]


def test_a_spelling_that_the_reference_tool_does_not_look_for_is_invalid(tmp_path: Path) -> None:
    folder = put(tmp_path / "skill", good("skill").encode(), "Skill.md")
    assert reference.validate(folder) == ["Missing required file: SKILL.md"]
    assert [each.code for each in examine(folder, strictly=True).diagnostics] == ["spelling"]
    assert not examine(folder).faulty


@pytest.mark.parametrize(
    "document",
    [
        good("big", "x: y\n" * 60_000),
        good("big", "".join(f"k{number}: v\n" for number in range(60_000))),
        good("big", "\x85" * 200_000),
        good("big", body="a" * (17 * 1024 * 1024)),
        good("big", "[" * 200_000),
        "---" + "\t" * 1_000_000 + "---",
        "---\n" + "a:\n" * 80_000,
        "---\n" + '"' * 200_000 + "\n---\n",
    ],
    ids=range(8),
)
def test_no_document_keeps_the_judge_busy(document: str) -> None:
    began = time.thread_time()
    verdict(document.encode(), "big")
    assert time.thread_time() - began < 2
