"""Where skills may come from: linked folders, and the files of a chat."""

import os
import shutil
import threading
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.skills import scan
from tests.skills.folders import CHAT, codes, library, write_skill


async def test_linked_folders_may_lead_into_roots_and_nowhere_else(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_skill(other / "linked")
    write_skill(mine / "group" / "own")
    write_skill(tmp_path / "outside" / "secret")
    write_skill(tmp_path / "data" / "skills" / "local" / "private")
    for name, target in {
        "linked": "../other/linked",
        "own": str(mine / "group" / "own"),
        "secret": "../outside/secret",
        "private": "../data/skills/local/private",
        "broken": "nowhere",
        "loop": "loop",
        "round": ".",
        "file": "group/own/SKILL.md",
    }.items():
        (mine / name).symlink_to(target)
    catalogue = await library(tmp_path / "data", mine, other).catalogue(CHAT)
    linked = catalogue.find("skill://assistant/linked/SKILL.md")
    assert linked.folder == other / "linked"
    assert sorted(skill.uri for skill in catalogue.skills) == [
        "skill://assistant-2/linked/SKILL.md",
        "skill://assistant/group/own/SKILL.md",
        "skill://assistant/linked/SKILL.md",
        "skill://assistant/own/SKILL.md",
        "skill://user/private/SKILL.md",
    ]
    assert codes(catalogue) == {
        "broken": ["link-broken"],
        "loop": ["link-broken"],
        "private": ["link-refused"],
        "secret": ["link-refused"],
    }


async def test_skills_of_a_workspace_are_offered_only_if_that_is_allowed(tmp_path: Path) -> None:
    workspace = tmp_path / "sandbox" / "workspace" / "local" / "chat-chat"
    write_skill(workspace / "skills" / "own")
    assert (await library(tmp_path).catalogue(CHAT)).skills == ()
    (skill,) = (await library(tmp_path, workspace=True).catalogue(CHAT)).skills
    assert skill.uri == "skill://workspace/own/SKILL.md"


async def test_no_link_in_a_workspace_is_followed(tmp_path: Path) -> None:
    workspace, mine = tmp_path / "sandbox" / "workspace" / "local" / "chat-chat", tmp_path / "mine"
    write_skill(mine / "one")
    (workspace / "skills").mkdir(parents=True)
    (workspace / "skills" / "two").symlink_to(mine / "one")
    (workspace / "skills" / "three").symlink_to("/dev/zero")
    shelves = library(tmp_path, mine, workspace=True)
    catalogue = await shelves.catalogue(CHAT)
    assert [skill.uri for skill in catalogue.skills] == ["skill://assistant/one/SKILL.md"]
    assert codes(catalogue) == {"two": ["link-refused"], "three": ["link-refused"]}
    await anyio.to_thread.run_sync(shutil.rmtree, workspace / "skills")
    (workspace / "skills").symlink_to(mine)
    catalogue = await shelves.catalogue(CHAT)
    assert [skill.uri for skill in catalogue.skills] == ["skill://assistant/one/SKILL.md"]
    assert codes(catalogue) == {"skills": ["root-unreadable"]}


async def test_a_folder_swapped_for_a_link_again_and_again_shows_nothing_of_its_target(
    tmp_path: Path,
) -> None:
    skills = tmp_path / "sandbox" / "workspace" / "local" / "chat-chat" / "skills"
    write_skill(skills / "a", description="Mine.")
    write_skill(tmp_path / "elsewhere", name="a", description="Secret.")
    (skills / "b").symlink_to(tmp_path / "elsewhere")
    enough = threading.Event()

    def swap() -> None:
        while not enough.is_set():
            for one, two in (("a", "c"), ("b", "a"), ("c", "b")):
                os.rename(skills / one, skills / two)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen = set()
    try:
        shelves = library(tmp_path, workspace=True)
        with anyio.fail_after(30):
            for _ in range(200):
                found = (await shelves.catalogue(CHAT)).skills
                seen |= {skill.front.description for skill in found}
    finally:
        enough.set()
        swapping.join()
    assert seen <= {"Mine."}


async def test_what_did_not_change_in_a_workspace_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skills = tmp_path / "sandbox" / "workspace" / "local" / "chat-chat" / "skills"
    for name in ("one", "two"):
        write_skill(skills / name)
    shelves = library(tmp_path, workspace=True)
    await anyio.sleep(0.1)
    before = await shelves.catalogue(CHAT)
    monkeypatch.setattr(scan, "parse", None)
    assert await shelves.catalogue(CHAT) is before
    os.rename(skills / "one", tmp_path / "one")
    (skills / "one").symlink_to(tmp_path / "one")
    after = await shelves.catalogue(CHAT)
    assert [skill.name for skill in after.skills] == ["two"]
    assert codes(after) == {"one": ["link-refused"]}
