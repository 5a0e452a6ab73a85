"""Tries a skill out, and tells what it would lack, in a sandbox that ends with that.

What a skill declares to be tried out, and how, is read by pure functions.

tests/*.py, *.sh, *.js    (also test/) pass when they end with exit code 0. Python files are run
                          by pytest or unittest where they are written for it. Only files with
                          "test" in their name are tests, and all shell scripts.
evals/evals.json          Entries of {"evals": [...]} with a `command` pass when it ends with
                          `exit_code` (0 unless given) and prints `stdout`, if that is given. The
                          others are tasks for a model and are skipped, as nothing here is one.
every other script        is read by its interpreter, without running it.

A skill is activated as in a chat, so that it lies where agents find it; the tests and examples that
it declares run in fresh copies of its folder, without a network, other skills or other files.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from anyio import to_thread

from mcp_sandbox.app.chats import on_trial, open_session, temporary_data
from mcp_sandbox.config import Config, SkillsConfig
from mcp_sandbox.errors import SandboxGone, Unsupported, UnusableSkill
from mcp_sandbox.models import ExecResult
from mcp_sandbox.sessions.skills import ask_inventory
from mcp_sandbox.skills.needs.findings import find_missing, scan
from mcp_sandbox.skills.parse import parse
from mcp_sandbox.skills.repair import repair
from mcp_sandbox.skills.skill import DOCUMENT, Diagnostic, Level, MissingRequirement
from mcp_sandbox.skills.supply.fetch import fix_document_name
from mcp_sandbox.skills.supply.installed import write_tree
from mcp_sandbox.skills.supply.tree import SourceFile, Tree, read_folder

if TYPE_CHECKING:
    from mcp_sandbox.sessions.session import Session

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
Verdict = Literal["passed", "failed", "skipped"]
_COPY = 'mkdir -p "$1" && cp -r "$2/." "$1" && chmod -R u+w "$1"'


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


@dataclass(frozen=True)
class ExampleResult:
    """The outcome of an example; `why` unless it passed."""

    example: Example
    verdict: Verdict
    why: str = ""
    duration_ms: int = 0


async def try_out(
    folder: Path, config: Config, *, timeout_s: float = 60.0
) -> Sequence[ExampleResult]:
    """Run the examples of the skill in a folder, each for at most `timeout_s`.

    Raises:
        UnusableSkill: it cannot be used, or its files cannot be accepted.
        OperatorError: no sandbox can be made.
    """
    name, tree = await to_thread.run_sync(_read, folder)
    found = examples({path: file.data for path, file in tree.items()})
    async with temporary_data() as data:
        root = data / "root"
        await to_thread.run_sync(root.mkdir)
        await to_thread.run_sync(write_tree, root / name, tree)
        # Its sandbox sees nothing but the skill.
        skills = SkillsConfig(folders=(root,), shipped=False)
        alone = on_trial(config, data / "data")
        own = {"network": "none", "skills": skills, "env": {}}
        async with open_session("trial", config=alone.model_copy(update=own)) as session:
            skill = (await session.skills.activate(name)).path_in_sandbox
            if skill is None:
                raise UnusableSkill("skills are switched off: set skills.enabled to true")
            return [
                await _tried(session, skill, f"/workspace/trial/{number}", example, timeout_s)
                for number, example in enumerate(found)
            ]


def _read(folder: Path) -> tuple[str, Tree]:
    """Return the skill's name and files, changed so that a model may activate it."""
    tree = fix_document_name(read_folder(folder))
    document = tree[DOCUMENT]
    front = parse(document.data, folder.resolve().name).front
    if front is None:
        raise UnusableSkill(
            f"the skill in {folder} cannot be used: `mcp-sandbox skills validate {folder}` says why"
        )
    if not front.model_invocable:
        # Move the field that hides the skill from models to where it has no effect.
        repaired = repair(document.data, front.name, everything=True).data
        tree = {**tree, DOCUMENT: SourceFile(repaired)}
    return front.name, tree


async def _tried(
    session: "Session", skill: str, place: str, example: Example, timeout_s: float
) -> ExampleResult:
    """Run an example in a folder of its own; `skill` is the path of the skill there."""
    if example.skipped:
        return ExampleResult(example, "skipped", example.skipped)
    copy = ["bash", "-c", _COPY, "copy", place, skill]
    env = {"SKILL_DIR": skill, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = await session.exec(copy, timeout_s=60)
        if result.success:
            result = await session.exec(example.command, cwd=place, env=env, timeout_s=timeout_s)
    except Unsupported as exc:
        return ExampleResult(example, "skipped" if example.kind == "syntax" else "failed", str(exc))
    except SandboxGone:
        return ExampleResult(example, "failed", "it brought its sandbox down")
    return replace(_judged(example, result), duration_ms=result.duration_ms)


def _judged(example: Example, result: ExecResult) -> ExampleResult:
    if result.timed_out:
        return ExampleResult(example, "failed", "it took too long")
    if result.exit_code == 127 and example.kind == "syntax":
        return ExampleResult(example, "skipped", f"there is no {example.command[0]} in the sandbox")
    if result.exit_code != example.exit_code:
        ended = result.signal or f"exit code {result.exit_code}"
        return ExampleResult(example, "failed", f"{ended}: {_last_lines(result)}")
    if example.stdout is not None and result.stdout.strip() != example.stdout.strip():
        return ExampleResult(example, "failed", f"it printed {_last_lines(result)!r}")
    return ExampleResult(example, "passed")


def _last_lines(result: ExecResult) -> str:
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return "\n".join(line[:200] for line in lines[-3:]) or "it said nothing"


async def find_lacking(
    skills: Mapping[str, Mapping[str, bytes]], config: Config
) -> Mapping[str, Sequence[Diagnostic]]:
    """Return what the skills need that a sandbox lacks, before any chat has one.

    A new sandbox with the settings of all others is asked, unless nothing is needed.
    """
    scanned = await to_thread.run_sync(lambda: {name: scan(skills[name]) for name in skills})
    needs = {(need.kind, need.name): need for _, all_ in scanned.values() for need in all_}
    if not needs:
        return {}
    async with temporary_data() as data:
        alone = on_trial(config, data)
        async with open_session("preflight", config=alone) as session:
            run = partial(session.exec, timeout_s=20)
            network = config.network != "none" or session.backend == "unsafe-local"
            inventory = await ask_inventory(run, list(needs.values()), network=network)
    return await to_thread.run_sync(
        lambda: {
            name: [_as_diagnostic(each) for each in find_missing(required, inventory)]
            for name, (_, required) in scanned.items()
        }
    )


def _as_diagnostic(each: MissingRequirement) -> Diagnostic:
    needed = "It needs" if each.always else "Some of it needs"
    reason = f"{needed} {each.name} ({each.need}), which sandboxes lack."
    fix = each.fix or "Do without, or use an image that has it."
    if each.layer:
        fix += f", in an image: mcp-sandbox images recipe {each.layer}"
    level: Level = "warning" if each.always else "note"
    return Diagnostic("unmet", level, reason, fix, file=each.needed_by[0])
