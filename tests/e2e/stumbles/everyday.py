"""Replays an everyday session of a coding agent: `python -m tests.e2e.stumbles.everyday`.

Prints each call and whether its answer was misleading or empty, and exits 1 if one was.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import anyio

from tests.e2e.stumbles.agents import Agent, opened
from tests.e2e.stumbles.coding import GIT, MISTAKES, NATIVE, PACKAGE
from tests.e2e.stumbles.judging import PROGRAMS, Outcome, Step, outcome
from tests.e2e.stumbles.kinds import KINDS
from tests.e2e.stumbles.working import DATA, NETWORK, OUTPUT, PICTURES
from tests.server.scripted import text_of

SESSION = (*PACKAGE, *GIT, *NATIVE, *MISTAKES, *DATA, *OUTPUT, *NETWORK, *PICTURES, *KINDS)
# So small that they are met soon, and a file's before that of the workspace.
SETTINGS = {"limits": {"file_size": "200m", "memory": "512m"}}
_SHOWN_CHARS = 60
_TOLD_CHARS = 4000


async def replay(agent: Agent, backend: str, session: Iterable[Step] = SESSION) -> list[Outcome]:
    """Call after call, each judged."""
    programs = await _programs(agent)
    answered: list[Outcome] = []
    for step in session:
        if step.only in ("", backend):
            before = answered[-1].text if answered else ""
            answered.append(await _call(agent, step, before, programs))
    return answered


def misleading(answered: Iterable[Outcome]) -> list[str]:
    """A line for each answer that is wrong."""
    return [f"{shown(each)}: {'; '.join(each.faults)}" for each in answered if each.faults]


async def _programs(agent: Agent) -> Sequence[str]:
    # In a call of its own, so that no answer of the session is asked for what it must not know.
    found = await agent.call("exec", command=f"command -v {' '.join(PROGRAMS)}; true")
    return [line.rpartition("/")[2] for line in text_of(found).splitlines()]


async def _call(agent: Agent, step: Step, before: str, programs: Sequence[str]) -> Outcome:
    given = step.given(before) if callable(step.given) else step.given
    began = monotonic()
    with anyio.fail_after(120):
        result = await agent.call(step.tool, **given)
    return outcome(step, given, result, monotonic() - began, programs)


def shown(each: Outcome) -> str:
    """The call in a few words."""
    values = " ".join(str(value) for value in each.given.values())
    return f"{each.tool} {' '.join(values.split())[:_SHOWN_CHARS]}".strip()


def table(answered: Sequence[Outcome], backend: str) -> str:
    rows = [
        f"{'misleading' if each.faults else 'ok':10}  {each.seconds:5.1f} s  {shown(each)}"
        + "".join(f"\n{'':22}{fault}" for fault in each.faults)
        for each in answered
    ]
    wrong = len(misleading(answered))
    end = f"{backend}: {len(answered)} calls, {wrong} with a misleading or empty answer"
    return "\n".join([*rows, "", end, ""])


def transcript(answered: Sequence[Outcome], backend: str) -> str:
    """All calls and answers as Markdown; long ones shortened in their middle."""
    parts = [f"# An everyday session on {backend}", ""]
    for number, each in enumerate(answered, 1):
        asked = json.dumps(each.given, ensure_ascii=False, default=str)
        verdict = f"**misleading: {'; '.join(each.faults)}**" if each.faults else "ok"
        parts += [f"## {number}. {each.tool}", "", *_fenced(asked), *_fenced(each.text)]
        image = ", with an image" if each.pictures else ""
        parts += [f"{each.seconds:.1f} s{image}, {verdict}", ""]
    return "\n".join(parts)


def _fenced(text: str) -> list[str]:
    cut = len(text) - _TOLD_CHARS
    if cut > 0:
        half = _TOLD_CHARS // 2
        text = f"{text[:half]}\n(… {cut:,} characters are not in this transcript …)\n{text[-half:]}"
    return ["~~~~text", text.rstrip("\n"), "~~~~", ""]


async def play(backend: str, data_root: Path, settings: Mapping[str, Any]) -> list[Outcome]:
    async with opened(backend, data_root, settings) as agent:
        return await replay(agent, backend)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.stumbles.everyday")
    parser.add_argument("--backend", choices=("docker", "bubblewrap"), required=True)
    parser.add_argument("--transcript", type=Path, help="write all calls and answers there")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mcs-everyday-"))
    try:
        answered = anyio.run(play, given.backend, folder / "data", SETTINGS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(table(answered, given.backend))
    if given.transcript:
        given.transcript.write_text(transcript(answered, given.backend))
    return int(bool(misleading(answered)))


if __name__ == "__main__":
    sys.exit(main())
