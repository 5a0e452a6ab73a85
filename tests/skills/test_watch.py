"""When clients are told that skills changed."""

import shutil
from collections.abc import AsyncIterator, Set
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.models import ChatId
from tests.skills.folders import CHAT, library, looks_counted, write_skill


async def following(changes: AsyncIterator[Set[str]]) -> Set[str]:
    with anyio.fail_after(20):
        return await anext(changes)


async def test_hundreds_of_edits_in_a_row_are_one_change(tmp_path: Path) -> None:
    for number in range(3):
        write_skill(tmp_path / "mine" / f"old-{number}")
    async with library(tmp_path, tmp_path / "mine").changes(CHAT) as changes:
        await anyio.to_thread.run_sync(shutil.rmtree, tmp_path / "mine" / "old-0")
        write_skill(tmp_path / "mine" / "old-1", description="Does more.")
        for number in range(300):
            write_skill(tmp_path / "mine" / f"new-{number}")
            await anyio.sleep(0.001)
        change = await following(changes)
    names = ["old-0", "old-1", *(f"new-{number}" for number in range(300))]
    assert change == {f"skill://assistant/{name}/SKILL.md" for name in names}


async def test_a_program_that_writes_beside_a_skill_changes_nothing(tmp_path: Path) -> None:
    skill = write_skill(tmp_path / "mine" / "one")
    async with library(tmp_path, tmp_path / "mine").changes(CHAT) as changes:
        for number in range(200):
            (skill / "target" / f"part-{number}").mkdir(parents=True)
            (skill / f"{number}.o").touch()
        with pytest.raises(TimeoutError), anyio.fail_after(1):
            await anext(changes)


async def test_edits_without_end_are_told_all_the_same(tmp_path: Path) -> None:
    async def edit() -> None:
        number = 0
        while True:
            write_skill(tmp_path / "mine" / "one", description=f"Does {number}.")
            number += 1
            await anyio.sleep(0.01)

    write_skill(tmp_path / "mine" / "one")
    async with library(tmp_path, tmp_path / "mine").changes(CHAT) as changes:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(edit)
            change = await following(changes)
            tasks.cancel_scope.cancel()
    assert change == {"skill://assistant/one/SKILL.md"}


async def test_nobody_hears_of_the_skills_of_others(tmp_path: Path) -> None:
    shelves = library(tmp_path)
    async with (
        shelves.changes(ChatId("ann", "chat")) as hers,
        shelves.changes("bob") as his,
    ):
        write_skill(tmp_path / "skills" / "ann" / "one")
        write_skill(tmp_path / "skills" / "bob" / "two")
        assert await following(hers) == {"skill://user/one/SKILL.md"}
        assert await following(his) == {"skill://user/two/SKILL.md"}


async def test_nobody_looks_when_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = looks_counted(monkeypatch)
    write_skill(tmp_path / "mine" / "one")
    async with library(tmp_path, tmp_path / "mine").changes(CHAT) as changes:
        write_skill(tmp_path / "mine" / "two")
        await following(changes)
    seen = len(looks)
    await anyio.sleep(0.5)
    assert len(looks) == seen > 2
