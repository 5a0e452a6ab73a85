"""The layout of the data root, who owns what in it, and what it refuses."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import StorageUnavailable, WorkspaceFull
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import MEMORY_FILES, SUBDIRECTORIES
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("ann", "c1")
ROOT = os.geteuid() == 0
OWNER = (10001, 10001) if ROOT else (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=OWNER)
USER_DATA = (
    "/workspace/{user}/chat-{chat}",
    "/mnt/user-data/workspace",
    "/mnt/user-data/uploads=uploads",
    "/mnt/user-data/outputs=outputs",
)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o7777


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_new_chat_gets_two_empty_trees_of_the_sandbox_user(tmp_path: Path) -> None:
    data = tmp_path / "not" / "yet" / "there"
    found = await Workspaces(data, users=USERS).open(CHAT)
    assert found.workspace == data / "sandbox" / "workspace" / "ann" / "chat-c1"
    assert found.home == data / "sandbox" / "home" / "ann" / "chat-c1"
    assert found.workspace_inode == found.workspace.stat().st_ino
    for tree in (found.workspace, found.home):
        assert list(tree.iterdir()) == []
        assert (tree.stat().st_uid, tree.stat().st_gid) == OWNER
        assert mode(tree) == 0o700
        for parent in list(tree.parents)[:4]:
            assert (parent.stat().st_uid, mode(parent)) == (os.geteuid(), 0o700)


async def test_opening_again_finds_the_files(tmp_path: Path) -> None:
    first = await Workspaces(tmp_path / "data", users=USERS).open(CHAT)
    (first.workspace / "file").write_text("kept")
    before = descriptors()
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    for _ in range(20):
        assert await workspaces.open(CHAT) == first
    assert (first.workspace / "file").read_text() == "kept"
    assert descriptors() == before


async def test_chats_and_users_never_share_a_tree(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    ids = [("a", "b"), ("A", "b"), ("a", "B"), ("a", "chat-b"), ("chat-a", "b"), ("a.", "b")]
    inodes = {(await workspaces.open(ChatId(*each))).workspace_inode for each in ids}
    assert len(inodes) == len(ids)


async def test_the_longest_ids_fit(tmp_path: Path) -> None:
    await Workspaces(tmp_path / "data", users=USERS).open(ChatId("u" * 128, "c" * 128))


OPENER = """
import sys, anyio
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.users import SandboxUsers
users = SandboxUsers(one=(int(sys.argv[2]), int(sys.argv[3])))
workspaces = Workspaces(Path(sys.argv[1]), users=users)
async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100):
        found = await workspaces.open(ChatId("ann", f"c{number}"))
        if number % 10 == 0:
            await workspaces.discard(ChatId("ann", "shared"))
        print(found.workspace_inode)
anyio.run(main)
"""


@pytest.mark.slow
def test_processes_that_open_the_same_chats_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENER, str(tmp_path / "data"), *map(str, OWNER)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("go\n", timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs[0].split()) == 100
    assert len(set(outputs)) == 1


@pytest.mark.skipif(not ROOT, reason="needs root to give trees away")
async def test_a_creation_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    tree = tmp_path / "data" / "sandbox" / "workspace" / "ann" / "chat-c1"
    tree.mkdir(parents=True, mode=0o700)
    found = await Workspaces(tmp_path / "data", users=USERS).open(CHAT)
    assert found.workspace.stat().st_uid == OWNER[0]


async def test_a_chat_that_closed_its_own_workspace_gets_it_opened(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    found = await workspaces.open(CHAT)
    found.workspace.chmod(0)
    await workspaces.open(CHAT)
    assert mode(found.workspace) == 0o700


async def test_subdirectories_are_made_once_on_request(tmp_path: Path) -> None:
    settings = WorkspaceConfig(subdirectories=True)
    workspaces = Workspaces(tmp_path / "data", users=USERS, settings=settings)
    found = await workspaces.open(CHAT)
    assert {path.name for path in found.workspace.iterdir()} == set(SUBDIRECTORIES)
    for name, text in MEMORY_FILES.items():
        path = found.workspace / ".memory" / name
        assert path.read_text() == text
        assert (path.stat().st_uid, path.stat().st_gid) == OWNER
    (found.workspace / "temp").rmdir()
    (found.workspace / ".memory" / "progress.md").write_text("half done")
    await workspaces.open(CHAT)
    assert not (found.workspace / "temp").exists()
    assert (found.workspace / ".memory" / "progress.md").read_text() == "half done"


async def test_aliases_reach_the_same_files(tmp_path: Path) -> None:
    settings = WorkspaceConfig(aliases=USER_DATA)
    workspaces = Workspaces(tmp_path / "data", users=USERS, settings=settings)
    found = await workspaces.open(CHAT)
    folder, again = found.aliases
    assert (folder.target, folder.read_only) == ("/mnt/user-data", True)
    assert (again.target, again.source, again.read_only) == (
        "/mnt/user-data/workspace",
        found.workspace,
        False,
    )
    assert mode(folder.source) == 0o755
    assert os.readlink(folder.source / "uploads") == "/workspace/uploads"
    assert (folder.source / "workspace").is_dir()
    assert (found.workspace / "uploads").stat().st_uid == OWNER[0]
    inner = found.workspace / "ann" / "chat-c1"
    assert inner.lstat().st_uid == OWNER[0]
    assert inner.stat().st_ino == found.workspace_inode
    assert await workspaces.open(CHAT) == found


async def test_what_a_chat_put_in_the_way_of_an_alias_stays_and_leads_nowhere(
    tmp_path: Path,
) -> None:
    settings = WorkspaceConfig(aliases=USER_DATA)
    found = await Workspaces(tmp_path / "data", users=USERS).open(CHAT)
    outside = tmp_path / "outside"
    outside.mkdir()
    (found.workspace / "uploads").symlink_to(outside)
    (found.workspace / "ann").symlink_to(outside)
    (found.workspace / "outputs").write_text("a file")
    again = await Workspaces(tmp_path / "data", users=USERS, settings=settings).open(CHAT)
    assert list(outside.iterdir()) == []
    assert (found.workspace / "outputs").read_text() == "a file"
    assert {mount.source for mount in again.aliases} & {
        found.workspace / "uploads",
        found.workspace / "outputs",
    } == set()


async def test_discarding_leaves_an_empty_tree_and_keeps_the_old_one_in_the_trash(
    tmp_path: Path,
) -> None:
    settings = WorkspaceConfig(subdirectories=True)
    workspaces = Workspaces(tmp_path / "data", users=USERS, settings=settings)
    found = await workspaces.open(CHAT)
    (found.workspace / "file").write_text("old")
    (found.home / "history").write_text("mine")
    await workspaces.discard(CHAT)
    fresh = await workspaces.open(CHAT)
    assert fresh.workspace == found.workspace
    assert fresh.workspace_inode != found.workspace_inode
    assert {path.name for path in fresh.workspace.iterdir()} == set(SUBDIRECTORIES)
    assert (found.home / "history").exists()
    (item,) = (tmp_path / "data" / "sandbox" / "trash").iterdir()
    assert (item / "workspace" / "file").read_text() == "old"
    assert await workspaces.empty_trash(is_due=lambda _name: False) == ((), ())
    assert item.exists()
    assert await workspaces.empty_trash(is_due=lambda _name: True) == ((item.name,), ())
    assert not item.exists()


async def test_emptying_the_trash_can_be_cancelled_and_resumed(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    found = await workspaces.open(CHAT)
    for name in range(2_000):
        (found.workspace / str(name) / "x").mkdir(parents=True)
    await workspaces.discard(CHAT)
    with anyio.fail_after(20):
        with anyio.move_on_after(0.01) as scope:
            await workspaces.empty_trash(is_due=lambda _name: True)
        assert scope.cancelled_caught
        assert len((await workspaces.empty_trash(is_due=lambda _name: True))[0]) == 1


async def test_the_meter_sees_workspace_and_home_and_refuses_at_the_limit(tmp_path: Path) -> None:
    settings = WorkspaceConfig(size_limit=1024**2, min_free=0)
    workspaces = Workspaces(tmp_path / "data", users=USERS, settings=settings)
    found = await workspaces.open(CHAT)
    meter = workspaces.open_disk_usage(CHAT)
    (found.workspace / "a").write_bytes(b"x" * 600_000)
    (found.home / "b").write_bytes(b"x" * 600_000)
    with anyio.fail_after(5):
        usage = await meter.usage()
        assert usage.used_bytes > 1_200_000
        assert (usage.limit_bytes, usage.files, usage.exact) == (1024**2, 2, True)
        with pytest.raises(WorkspaceFull, match="delete files"):
            await meter.check_room()
        (found.home / "b").unlink()
        meter.note_change()
        await meter.check_room()


def refusals(tmp_path: Path) -> Iterable[tuple[Path, str]]:
    file = tmp_path / "file"
    file.touch()
    yield file, "is not a directory"
    yield file / "below", "is not a directory"
    for bits in (0o777, 0o703, 0o1777):
        shared = tmp_path / f"shared-{bits:o}"
        shared.mkdir()
        shared.chmod(bits)
        yield shared, "chmod go-w"
    linked = tmp_path / "linked"
    linked.mkdir(mode=0o700)
    (linked / "sandbox").symlink_to(tmp_path)
    yield linked, "links are not followed"
    blocked = tmp_path / "blocked"
    blocked.mkdir(mode=0o700)
    (blocked / "sandbox").touch()
    yield blocked, "remove the file"


async def test_a_data_root_that_cannot_be_trusted_is_refused_with_a_remedy(tmp_path: Path) -> None:
    before = descriptors()
    for path, remedy in refusals(tmp_path):
        with pytest.raises(StorageUnavailable, match=remedy):
            await Workspaces(path, users=USERS).open(CHAT)
    assert descriptors() == before


@pytest.mark.skipif(not ROOT, reason="needs root to give a directory away")
async def test_a_data_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StorageUnavailable, match="belongs to uid 65534"):
        await Workspaces(tmp_path, users=USERS).open(CHAT)


async def test_a_file_system_that_ignores_case_is_refused(tmp_path: Path) -> None:
    await Workspaces(tmp_path, users=USERS).open(CHAT)
    (tmp_path / "sandbox" / "WORKSPACE").mkdir()
    with pytest.raises(StorageUnavailable, match="upper from lower case"):
        await Workspaces(tmp_path, users=USERS).open(CHAT)


@pytest.mark.skipif(not ROOT, reason="needs root to mount")
async def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=64k,nr_inodes=6,mode=0700"
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", options, "none", disk])
    try:
        with pytest.raises(StorageUnavailable, match="free some space"):
            await Workspaces(disk, users=USERS).open(CHAT)
        await anyio.run_process(["mount", "-o", "remount,ro", disk])
        with pytest.raises(StorageUnavailable, match="mount it writable"):
            await Workspaces(disk, users=USERS).open(CHAT)
    finally:
        await anyio.run_process(["umount", disk])


async def test_measuring_a_new_chat_makes_no_trees(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    assert (await workspaces.open_disk_usage(CHAT).usage()).files == 0
    for kind in ("workspace", "home"):
        assert list((tmp_path / "data" / "sandbox" / kind / "ann").iterdir()) == []
