"""Which chats have files, and what the chats of one user may hold together."""

import os
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import StorageUnavailable, WorkspaceFull
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import UserTotals, Workspaces
from mcp_sandbox.workspace.meter import TreeUsage
from mcp_sandbox.workspace.users import SandboxUsers

OWNER = (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=OWNER)
MIB = 1024**2
A, B, OTHERS = ChatId("ann", "a"), ChatId("ann", "b"), ChatId("bob", "a")


async def test_every_chat_with_a_workspace_is_found_and_nothing_else(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    assert await workspaces.chats() == []
    for chat in (B, A, OTHERS):
        await workspaces.open(chat)
    root = tmp_path / "data" / "sandbox" / "workspace"
    for name in ("ann/notes", "ann/chat-", "ann/chat-..", "-x/chat-a", "ann/chat-\n"):
        (root / name).mkdir(parents=True)
    (root / "file").touch()
    (root / "ann" / "chat-file").touch()
    (root / "ann" / "chat-link").symlink_to(tmp_path)
    (root / "link").symlink_to(root / "ann")
    assert await workspaces.chats() == [A, B, OTHERS]


async def test_a_removed_chat_is_in_the_trash_and_makes_no_new_trees(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS, now=lambda: 1_700_000_000.0)
    found = await workspaces.open(A)
    (found.workspace / "file").write_bytes(b"x" * 100_000)
    (found.home / "history").write_text("mine")
    found.workspace.chmod(0)
    await workspaces.remove(A)
    await workspaces.remove(A)
    assert await workspaces.chats() == []
    assert not found.home.exists()
    (item,) = await workspaces.trashed()
    assert (item.chat, item.discarded_at) == (A, 1_700_000_000.0)
    assert item.allocated_bytes >= 100_000
    kept = tmp_path / "data" / "sandbox" / "trash" / item.name
    assert (kept / "home" / "history").read_text() == "mine"
    assert await workspaces.empty_trash(is_due=lambda name: False) == ((), ())
    assert kept.exists()
    assert await workspaces.empty_trash(is_due=lambda name: True) == ((item.name,), ())
    with pytest.raises(StorageUnavailable, match=item.name):
        await workspaces.take_back(item, A)
    assert not kept.exists()


async def test_the_chats_of_a_user_share_the_quota(tmp_path: Path) -> None:
    settings = WorkspaceConfig(user_quota=2 * MIB, min_free=0)
    workspaces = Workspaces(tmp_path / "data", users=USERS, settings=settings)
    trees = {chat: await workspaces.open(chat) for chat in (A, B, OTHERS)}
    for tree in trees.values():
        (tree.workspace / "file").write_bytes(b"x" * 1_200_000)
    with anyio.fail_after(10):
        meter = workspaces.open_disk_usage(A)
        with pytest.raises(WorkspaceFull, match=r"this user together are full: 2 MiB of 2 MiB .*"):
            await meter.check_room(10)
        assert (await meter.usage()).limit_bytes < MIB
        await workspaces.open_disk_usage(OTHERS).check_room(10)
        (trees[B].workspace / "file").unlink()
        # The other chat's own meter sees it, and with it every other one.
        await workspaces.open_disk_usage(B).read()
        await workspaces.open_disk_usage(A).check_room(10)


def test_unknown_chats_are_measured_and_old_figures_one_at_a_time() -> None:
    now = 0.0
    totals = UserTotals(clock=lambda: now)
    measured: list[ChatId] = []
    sizes: dict[ChatId, int] = {}

    def measure(chat: ChatId) -> TreeUsage:
        measured.append(chat)
        return TreeUsage(sizes.get(chat, 10), 1)

    def others(*siblings: ChatId) -> int:
        measured.clear()
        own, size = totals.measure(A, siblings, measure)
        assert own == TreeUsage(10, 1)
        assert measured.pop(0) == A
        return size

    c, d = ChatId("ann", "c"), ChatId("ann", "d")
    assert others(A, B, c, d) == 30
    assert measured == [B, c, d]
    assert others(A, B, c, d) == 30
    assert measured == []
    now = 31.0
    assert others(A, B, c, d) == 30
    assert measured == [B]
    assert others(A, B, c, d) == 30
    assert measured == [c]
    assert others(A, d) == 10
    sizes[c] = 50
    assert others(A, c) == 50


def test_what_could_not_be_counted_whole_is_no_less_than_before() -> None:
    now = 0.0
    totals = UserTotals(clock=lambda: now)
    totals.measure(A, [A, B], lambda chat: TreeUsage(50, 1))
    now = 31.0
    assert totals.measure(A, [A, B], lambda chat: TreeUsage(3, 1, complete=False))[1] == 50
