"""Where skills are seen: what a chat has put in the way is moved aside and never followed."""

import os
from pathlib import Path

import pytest

from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import ChatDirectories, Workspaces
from mcp_sandbox.workspace.view import Showing

CHAT = ChatId("ann", "c1")
OWNER = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


@pytest.fixture
def workspaces(tmp_path: Path) -> Workspaces:
    return Workspaces(tmp_path / "data", owner=OWNER, skills="mounted")


@pytest.fixture
async def chat(workspaces: Workspaces) -> ChatDirectories:
    return await workspaces.open(CHAT)


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def test_a_chat_gets_two_mounts_of_trees_beside_its_workspace(
    workspaces: Workspaces, chat: ChatDirectories
) -> None:
    assert await workspaces.clear_way(CHAT) == []
    outer, inner = chat.skills
    assert (outer.target, outer.read_only) == ("/workspace/.claude", False)
    assert (inner.target, inner.read_only) == ("/workspace/.claude/skills", True)
    assert outer.source.stat().st_uid == OWNER[0]
    assert inner.source.stat().st_mode & 0o777 == 0o755
    assert inner.source.stat().st_uid == os.geteuid()
    for mount in chat.skills:
        assert not mount.source.is_relative_to(chat.workspace)
    assert contents(chat.workspace) == [".claude"]
    assert contents(outer.source) == ["skills"]


async def test_files_that_a_chat_had_there_stay_where_it_sees_them(
    workspaces: Workspaces, chat: ChatDirectories
) -> None:
    (chat.workspace / ".claude" / "commands").mkdir(parents=True)
    (chat.workspace / ".claude" / "commands" / "mine.md").write_text("mine")
    (chat.workspace / ".claude" / "skills" / "own").mkdir(parents=True)
    said = await workspaces.clear_way(CHAT)
    assert said == [
        "/workspace/.claude/skills is where skills are shown: what was there before is called "
        "skills.set-aside-1 now, beside it"
    ]
    outer = chat.skills[0].source
    assert (outer / "commands" / "mine.md").read_text() == "mine"
    assert (outer / "skills.set-aside-1" / "own").is_dir()
    assert contents(outer / "skills") == []
    assert contents(chat.workspace) == [".claude"]
    assert outer.stat().st_uid == OWNER[0]


@pytest.mark.parametrize("where", [".claude", "skills"])
@pytest.mark.parametrize("what", ["link", "dangling", "file", "fifo"])
async def test_what_is_in_the_way_is_set_aside_unread(
    workspaces: Workspaces, chat: ChatDirectories, tmp_path: Path, where: str, what: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "skills").mkdir(parents=True)
    await workspaces.clear_way(CHAT)
    place = chat.workspace / where if where == ".claude" else chat.skills[0].source / where
    place.rmdir()
    match what:
        case "link":
            place.symlink_to(outside)
        case "dangling":
            place.symlink_to(tmp_path / "nowhere")
        case "file":
            place.write_text("mine")
        case _:
            os.mkfifo(place)
    kind = place.lstat().st_mode
    said = await workspaces.clear_way(CHAT)
    assert f"called {where}.set-aside-1 now" in said[0]
    assert place.is_dir()
    assert not place.is_symlink()
    assert place.with_name(f"{where}.set-aside-1").lstat().st_mode == kind
    assert contents(outside) == ["skills"]
    assert not (tmp_path / "nowhere").exists()
    assert await workspaces.clear_way(CHAT) == []


@pytest.mark.parametrize("showing", [None, "copied"])
async def test_where_nothing_is_mounted_a_chat_has_its_files_in_the_workspace(
    workspaces: Workspaces, tmp_path: Path, showing: Showing | None
) -> None:
    chat = await workspaces.open(CHAT)
    (chat.skills[0].source / "mine").write_text("mine")
    without = Workspaces(tmp_path / "data", owner=OWNER, skills=showing)
    opened = await without.open(CHAT)
    assert not opened.cleared
    assert await without.clear_way(CHAT) == []
    assert contents(chat.workspace) == [".claude", ".claude/mine"]
    assert (await without.open(CHAT)).cleared
    assert not (await workspaces.open(CHAT)).cleared
    assert await workspaces.clear_way(CHAT) == []
    assert contents(chat.workspace) == [".claude"]
    assert contents(chat.skills[0].source) == ["mine", "skills"]
    # What it made in the meantime is not lost, either.
    (chat.workspace / ".claude" / "newer").write_text("newer")
    await without.open(CHAT)
    await without.clear_way(CHAT)
    assert contents(chat.workspace) == [".claude", ".claude/newer"]
    assert contents(chat.skills[0].source) == ["mine", "skills"]


async def test_an_empty_workspace_forgets_the_skills_too(
    workspaces: Workspaces, chat: ChatDirectories, tmp_path: Path
) -> None:
    outer, inner = chat.skills
    (outer.source / "settings.json").write_text("{}")
    (inner.source / "pdf").mkdir(mode=0o555)
    again = await workspaces.discard(CHAT)
    assert contents(again.skills[0].source) == ["skills"]
    assert contents(again.skills[1].source) == []
    (item,) = (tmp_path / "data/sandbox/trash").iterdir()
    assert (item / "claude" / "settings.json").read_text() == "{}"
    await workspaces.remove(CHAT)
    assert not list((tmp_path / "data/sandbox").glob("*/ann/chat-c1"))


async def test_the_chats_own_files_count_and_its_skills_do_not(
    workspaces: Workspaces, chat: ChatDirectories
) -> None:
    before = (await workspaces.meter(CHAT).usage()).used_bytes
    (chat.skills[1].source / "large").write_bytes(b"x" * 1_000_000)
    assert (await workspaces.meter(CHAT).usage()).used_bytes == before
    (chat.skills[0].source / "large").write_bytes(b"x" * 1_000_000)
    assert (await workspaces.meter(CHAT).usage()).used_bytes >= before + 1_000_000
