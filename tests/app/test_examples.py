"""What a skill declares to be tried is found, whatever its author has written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.app.skill_tests import Example, examples

UNITTEST = b"import unittest\n\nclass TestIt(unittest.TestCase):\n    pass\n"
PYTEST = b"import pytest\n\ndef test_it():\n    pass\n"
PYTEST_RUN = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider")
UNITTEST_RUN = ("python3", "-m", "unittest", "discover")


def commands(**files: bytes) -> dict[str, tuple[str, ...]]:
    """Return the commands of tests; `test__a_py` is the file tests/a.py."""
    named = {f"tests/{name.replace('__', '.')}": data for name, data in files.items()}
    return {each.name[6:]: each.command for each in examples(named) if each.kind == "test"}


def test_tests_are_run_by_what_they_are_written_for() -> None:
    assert commands(
        test_plain__py=b"assert True\n",
        test_main__py=PYTEST + b"if __name__ == '__main__':\n    test_it()\n",
        test_unit__py=UNITTEST,
        test_it__py=PYTEST,
        test_inline__py=b"# /// script\n# dependencies = []\n# ///\n",
        it__sh=b"true",
        it__test__mjs=b"",
    ) == {
        "it.sh": ("bash", "tests/it.sh"),
        "it.test.mjs": ("node", "tests/it.test.mjs"),
        "test_inline.py": ("uv", "run", "--offline", "--script", "tests/test_inline.py"),
        "test_it.py": (*PYTEST_RUN, "tests/test_it.py"),
        "test_main.py": ("python3", "tests/test_main.py"),
        "test_plain.py": ("python3", "tests/test_plain.py"),
        "test_unit.py": (*UNITTEST_RUN, "-s", "tests", "-t", "tests", "-p", "test_unit.py"),
    }


def test_helpers_fixtures_and_templates_are_no_tests() -> None:
    files = {"tests/conftest.py": b"", "tests/fixtures/test_x.py": b"", "assets/x.py": b"{{ gap }}"}
    assert [(each.name, each.kind) for each in examples(files)] == [("tests/conftest.py", "syntax")]


def test_evals_with_a_command_are_run_and_the_others_skipped() -> None:
    evals = [
        {"id": 1, "prompt": "Do it.", "expected_output": "Well done."},
        {"id": 2, "command": "echo hi", "stdout": "hi", "exit_code": 3},
    ]
    asked, run = examples({"evals/evals.json": json.dumps({"evals": evals}).encode()})
    assert "a task for a model" in asked.skipped
    assert run == Example(
        "evals/evals.json#2", "eval", ("bash", "-c", "echo hi"), exit_code=3, stdout="hi"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"{}", b'{"evals": 3}', b"[" * 100_000])
def test_damaged_evals_fail_or_are_nothing(data: bytes) -> None:
    assert all(each.command[-1].endswith("exit 1") for each in examples({"evals/evals.json": data}))


@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=50), max_size=5))
def test_any_files_have_examples(files: dict[str, bytes]) -> None:
    assert all(each.command or each.skipped for each in examples(files))
