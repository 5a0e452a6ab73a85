"""Tries a skill out in a sandbox of its own, which ends with it: `mcp-sandbox skills test`.

The skill is activated as a chat does it, so that it lies where agents find it; what it declares
is run in fresh copies of its folder. Nothing of it sees a network, other skills or other files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anyio import to_thread

from mcp_sandbox.app import open_session, temporary_data
from mcp_sandbox.config import Config, SkillsConfig
from mcp_sandbox.errors import SandboxGone, Unsupported, UnusableSkill
from mcp_sandbox.models import ExecResult
from mcp_sandbox.skills.examples import Example, examples
from mcp_sandbox.skills.parse import parse
from mcp_sandbox.skills.repair import repair
from mcp_sandbox.skills.supply.fetch import spelled
from mcp_sandbox.skills.supply.folder import read_folder
from mcp_sandbox.skills.supply.staging import write_tree
from mcp_sandbox.skills.supply.tree import File, Tree
from mcp_sandbox.skills.uris import DOCUMENT

if TYPE_CHECKING:
    from mcp_sandbox.sessions.session import Session

Verdict = Literal["passed", "failed", "skipped"]
_COPY = 'mkdir -p "$1" && cp -r "$2/." "$1" && chmod -R u+w "$1"'
_COPY_TIMEOUT_S = 60.0
_LINES_SHOWN = 3
_LINE_SHOWN = 200


@dataclass(frozen=True)
class Trial:
    """What became of an example; `why` unless it passed."""

    example: Example
    verdict: Verdict
    why: str = ""
    duration_ms: int = 0


async def try_out(folder: Path, config: Config, *, timeout_s: float = 60.0) -> Sequence[Trial]:
    """Run what the skill in a folder declares; `timeout_s` is for each of its examples.

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
        async with open_session("trial", config=_alone(config, data, root)) as session:
            activation = await session.skills.activate(name)
            skill = activation.path_in_sandbox
            if skill is None:
                raise UnusableSkill("skills are switched off: set skills.enabled to true")
            bench = _Bench(session, skill, timeout_s)
            return [await bench.run(number, example) for number, example in enumerate(found)]


def _read(folder: Path) -> tuple[str, Tree]:
    """The skill's name and files, so that a model could activate it."""
    tree = spelled(read_folder(folder))
    document = tree[DOCUMENT]
    front = parse(document.data, folder.resolve().name).front
    if front is None:
        raise UnusableSkill(
            f"the skill in {folder} cannot be used: `mcp-sandbox skills validate {folder}` says why"
        )
    if not front.model_invocable:
        # Kept from models; the wish is moved to where nobody acts on it.
        repaired = repair(document.data, front.name, everything=True).data
        tree = {**tree, DOCUMENT: File(repaired)}
    return front.name, tree


def _alone(config: Config, data: Path, root: Path) -> Config:
    """The configuration for a sandbox that sees nothing but the skill."""
    skills = SkillsConfig(folders=(root,), shipped=False)
    update = {"data_dir": data / "data", "network": "none", "skills": skills, "env": {}}
    return config.model_copy(update=update)


@dataclass(frozen=True)
class _Bench:
    """Where examples are run, one after the other; `skill` is the path of the skill there."""

    session: "Session"
    skill: str
    timeout_s: float

    async def run(self, number: int, example: Example) -> Trial:
        if example.skipped:
            return Trial(example, "skipped", example.skipped)
        try:
            result = await self._run(f"/workspace/trial/{number}", example)
        except Unsupported as exc:
            return Trial(example, "skipped" if example.kind == "syntax" else "failed", str(exc))
        except SandboxGone:
            return Trial(example, "failed", "it brought its sandbox down")
        return replace(_judged(example, result), duration_ms=result.duration_ms)

    async def _run(self, place: str, example: Example) -> ExecResult:
        copy = ["bash", "-c", _COPY, "copy", place, self.skill]
        copied = await self.session.exec(copy, timeout_s=_COPY_TIMEOUT_S)
        if not copied.success:
            return copied
        return await self.session.exec(
            example.command,
            cwd=place,
            env={"SKILL_DIR": self.skill, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout_s=self.timeout_s,
        )


def _judged(example: Example, result: ExecResult) -> Trial:
    if result.timed_out:
        return Trial(example, "failed", "it took too long")
    if result.exit_code == 127 and example.kind == "syntax":
        return Trial(example, "skipped", f"there is no {example.command[0]} in the sandbox")
    if result.exit_code != example.exit_code:
        ended = result.signal or f"exit code {result.exit_code}"
        return Trial(example, "failed", f"{ended}: {_last_lines(result)}")
    if example.stdout is not None and result.stdout.strip() != example.stdout.strip():
        return Trial(example, "failed", f"it printed {_last_lines(result)!r}")
    return Trial(example, "passed")


def _last_lines(result: ExecResult) -> str:
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return "\n".join(line[:_LINE_SHOWN] for line in lines[-_LINES_SHOWN:]) or "it said nothing"
