"""Finding thousands of skills, for the first time and again."""

import os
import re
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import yaml

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, Failed, in_thread
from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.skills.library import SkillLibrary

_SKILLS = 5000
_FRONT_MATTER = re.compile(rb"---\n(.*?\n)---\n", re.DOTALL)
# About as long as the median of those that are published.
_DOCUMENT = """\
---
name: skill-{number}
description: Does thing {number} from beginning to end, with the checks that it needs. Use it when \
a person asks for thing {number}, names one of its files, or wants to know how it is done.
license: MIT
metadata:
  author: a person
  version: "1.{number}"
---
# Thing {number}

"""


async def _first(pairs: int) -> Measured:
    async with _folder() as folder:
        ours = partial(_listed, folder)
        theirs = partial(in_thread, partial(_read_and_parse, folder))
        return await times_slower(clocked(ours), clocked(theirs), pairs)


async def _again(values: int) -> Measured:
    async with _folder() as folder:
        library = await _listed(folder)
        await library.catalogue(CHAT)
        taken = []
        for _ in range(values):
            began = time.perf_counter()
            await library.catalogue(CHAT)
            taken.append(time.perf_counter() - began)
        return Measured(tuple(seconds * 1000 for seconds in taken), tuple(taken))


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "skills"
        await in_thread(partial(_write, folder))
        yield folder


def _write(folder: Path) -> None:
    for number in range(_SKILLS):
        skill = folder / f"skill-{number}"
        skill.mkdir(parents=True)
        text = _DOCUMENT.format(number=number) + "Do it step by step, and look.\n" * 100
        (skill / "SKILL.md").write_text(text)


async def _listed(folder: Path) -> SkillLibrary:
    settings = SkillsConfig(folders=(folder,), shipped=False)
    library = SkillLibrary(settings, folder.parent / "data")
    found = len((await library.catalogue(CHAT)).skills)
    if found != _SKILLS:
        raise Failed(f"the library found {found} skills instead of {_SKILLS}")
    return library


def _read_and_parse(folder: Path) -> None:
    """The least that anybody has to do who knows where the skills are."""
    found = []
    for name in os.listdir(folder):  # noqa: PTH208
        with open(f"{folder}/{name}/SKILL.md", "rb") as file:  # noqa: PTH123
            front = _FRONT_MATTER.match(file.read())
        if front is None:
            raise Failed(f"{name} has no front matter")
        found.append(yaml.load(front[1], Loader=yaml.CSafeLoader))
    if len(found) != _SKILLS:
        raise Failed(f"the loop found {len(found)} skills instead of {_SKILLS}")


ROWS = (
    Row(
        "skills",
        f"find {_SKILLS:,} skills for the first time",
        "a bare loop that reads and C-parses the same front matter",
        Goal(1.5),
        _first,
        pairs=10,
    ),
    Row(
        "skills-again",
        f"find the same {_SKILLS:,} skills again",
        "-",
        Goal(100, "ms"),
        _again,
        pairs=10,
    ),
)
