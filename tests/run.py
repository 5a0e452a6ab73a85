"""Runs the tests and sums them up: `python -m tests.run [--again] [--together] PYTEST-ARGUMENT...`

Several workers share all but the tests that are marked `alone`, which follow one by one: they
measure, or fill the machine; --together leaves those out. With --again, failed tests run once more;
what passed only then is named.
This module is also the plugin of pytest that tells the parts apart.
"""

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# Many tests wait for other processes, so that one worker more than there are cores is kept busy.
_WORKERS = (os.cpu_count() or 1) + 1
PARTS = {"together": ["-n", str(_WORKERS), "--dist", "worksteal"], "alone": []}
_NONE_SELECTED = int(pytest.ExitCode.NO_TESTS_COLLECTED)

Tally = dict[str, list[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="only the tests of this part")
    parser.addoption("--tally", type=Path, help="file for the tests of each outcome")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test of this part unread: to collect all takes some seconds."""
    is_whole_run = config.args_source is config.ArgsSource.TESTPATHS
    if config.getoption("--part") != "alone" or collection_path.is_dir() or not is_whole_run:
        return None
    marking = (collection_path, collection_path.with_name("conftest.py"))
    texts = [path.read_text() for path in marking if path.exists()]
    return None if any("mark.alone" in text for text in texts) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    mine: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_alone = item.get_closest_marker("alone") is not None
        (mine if is_alone == (part == "alone") else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    file = terminalreporter.config.getoption("--tally")
    if file is not None:
        tests = {
            outcome: [report.nodeid for report in reports if hasattr(report, "nodeid")]
            for outcome, reports in terminalreporter.stats.items()
            if outcome
        }
        file.write_text(json.dumps(tests))


def _run(parts: Sequence[str], arguments: list[str], scratch: str) -> tuple[int, Tally, list[str]]:
    """Run the parts; the worst exit code, the tests of each outcome, and the parts that failed."""
    codes, bad, tally = [], list[str](), collections.defaultdict[str, list[str]](list)
    for part in parts:
        print(f"== tests, {part}", flush=True)
        file = Path(f"{scratch}{part[0]}.json")
        command = [
            *(sys.executable, "-m", "pytest", "-p", "tests.run", "--part", part),
            *("--tally", str(file), "--basetemp", f"{scratch}{part[0]}", *PARTS[part], *arguments),
        ]
        codes.append(subprocess.run(command, check=False).returncode)
        bad += [part] if codes[-1] not in (0, _NONE_SELECTED) else []
        for outcome, tests in json.loads(file.read_text()).items() if file.exists() else ():
            tally[outcome] += tests
    worst = max(codes, key=lambda code: (code not in (0, _NONE_SELECTED), code == 0))
    return worst, tally, bad


def _failed(tally: Tally) -> list[str]:
    return list(dict.fromkeys([*tally.get("failed", ()), *tally.get("error", ())]))


def _print_summary(code: int, tally: Tally) -> None:
    for test in _failed(tally):
        print(f"   {test}")
    counts = ", ".join(
        f"{len(tally[outcome])} {outcome}"
        for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        if tally.get(outcome)
    )
    print(f"== all: {counts or 'no tests'}; {'good' if code == 0 else f'bad ({code})'}")


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    scratch = tempfile.mkdtemp(prefix="mcp-")
    try:
        yield scratch
    finally:
        # Python's own removal calls itself for each level, and a test leaves 4,000 of them.
        subprocess.run(["rm", "-rf", scratch], check=False)


def main() -> int:
    """Run the tests, again where that is asked for; return pytest's exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--together", action="store_true")
    options, arguments = parser.parse_known_args()
    parts = ["together"] if options.together else [*PARTS]
    with _scratch() as scratch:
        code, tally, bad = _run(parts, arguments, f"{scratch}/1")
        _print_summary(code, tally)
        failed = _failed(tally)
        if not (options.again and failed):
            return code
        # Tests that kill at random moments, on a machine that others use too: a failure counts
        # when it comes again.
        print("== running what failed once more")
        code, tally, _ = _run(bad, failed, f"{scratch}/2")
        _print_summary(code, tally)
        flaky = [test for test in failed if test in tally["passed"] and test not in _failed(tally)]
        print("== flaky: mend these", *flaky, sep="\n   ")
    return code


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main())
