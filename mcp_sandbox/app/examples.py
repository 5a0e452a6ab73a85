"""What a skill declares to be tried out, and how. Pure; running it is for a sandbox.

tests/*.py, *.sh, *.js    (also test/) pass when they end with exit code 0. Python files are run
                          by pytest or unittest where they are written for it. Only files with
                          "test" in their name are tests, and all shell scripts.
evals/evals.json          Entries of {"evals": [...]} with a `command` pass when it ends with
                          `exit_code` (0 unless given) and prints `stdout`, if that is given. The
                          others are tasks for a model and are skipped, as nothing here is one.
every other script        is read by its interpreter, without running it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

Kind = Literal["test", "eval", "syntax"]
# What lies there may be parts of programs, with gaps to fill in.
_NOT_WHOLE = frozenset({"assets", "templates", "template", "fixtures"})
_FOLDERS = frozenset({"tests", "test"})
_EVALS = "evals/evals.json"
_NO_EVALS = f"echo '{_EVALS} is no JSON with a list of evals' >&2; exit 1"
_NAMED_SO = re.compile(r"(?:^|[._-])tests?(?:[._-]|$)", re.IGNORECASE)
_INLINE_METADATA = re.compile(rb"^# /// script\s*$", re.MULTILINE)
_MAIN = re.compile(rb"^if __name__\b", re.MULTILINE)
_PYTEST = re.compile(rb"^(?:async )?def test_|^class Test\w*\b(?!.*TestCase)", re.MULTILINE)
_UNITTEST = re.compile(rb"^class \w+\(.*\bTestCase\b", re.MULTILINE)
_COMPILE = "import sys\nfor p in sys.argv[1:]:\n    compile(open(p, 'rb').read(), p, 'exec')"
_SYNTAX: Mapping[str, tuple[str, ...]] = {
    ".py": ("python3", "-c", _COMPILE),
    **dict.fromkeys((".sh", ".bash"), ("bash", "-n")),
    **dict.fromkeys((".js", ".cjs", ".mjs"), ("node", "--check")),
}


@dataclass(frozen=True)
class Example:
    """Something to try, in a fresh copy of the skill's folder; `skipped` says why it is not.

    `command` is a program with its arguments. It passes with `exit_code`, and where `stdout` is
    given, when it prints just that but for white space around it.
    """

    name: str
    kind: Kind
    command: tuple[str, ...] = ()
    exit_code: int = 0
    stdout: str | None = None
    skipped: str = ""


def examples(files: Mapping[str, bytes]) -> Sequence[Example]:
    """Return what is to be tried of a skill: tests, then evals, then the syntax of its scripts."""
    tests = [
        Example(path, "test", _command(PurePosixPath(path), data))
        for path, data in sorted(files.items())
        if _is_test(path)
    ]
    evals = list(_evals(files[_EVALS])) if _EVALS in files else []
    scripts = [
        Example(str(path), "syntax", (*_SYNTAX[path.suffix], str(path)))
        for path in map(PurePosixPath, sorted(files.keys() - {example.name for example in tests}))
        if path.suffix in _SYNTAX and _NOT_WHOLE.isdisjoint(path.parts)
    ]
    return [*tests, *evals, *scripts][:200]


def _is_test(path: str) -> bool:
    place = PurePosixPath(path)
    if _FOLDERS.isdisjoint(place.parts[:-1]) or "fixtures" in place.parts:
        return False
    if place.suffix in (".sh", ".bash"):
        return True
    return place.suffix in _SYNTAX and bool(_NAMED_SO.search(place.name))


def _command(place: PurePosixPath, data: bytes) -> tuple[str, ...]:
    if place.suffix != ".py":
        return (_SYNTAX[place.suffix][0], str(place))
    if _INLINE_METADATA.search(data):
        return ("uv", "run", "--offline", "--script", str(place))
    if not _MAIN.search(data):
        if _UNITTEST.search(data):
            folder = str(place.parent)
            where = ("-s", folder, "-t", folder, "-p", place.name)
            return ("python3", "-m", "unittest", "discover", *where)
        if _PYTEST.search(data):
            return ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(place))
    return ("python3", str(place))


def _evals(data: bytes) -> Iterator[Example]:
    try:
        found = json.loads(data[: 1 << 20])
        entries = found["evals"] if isinstance(found, dict) else found
        listed = [entry for entry in entries if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        yield Example(_EVALS, "eval", ("bash", "-c", _NO_EVALS))
        return
    for number, entry in enumerate(listed):
        yield _eval(f"{_EVALS}#{entry.get('id', number)}"[:100], entry)


def _eval(name: str, entry: Mapping[str, object]) -> Example:
    command, stdout, code = (entry.get(key) for key in ("command", "stdout", "exit_code"))
    if not isinstance(command, str) or not command.strip():
        return Example(name, "eval", skipped="a task for a model; with a `command` it is run")
    code = code if isinstance(code, int) else 0
    stdout = stdout if isinstance(stdout, str) else None
    return Example(name, "eval", ("bash", "-c", command), exit_code=code, stdout=stdout)
