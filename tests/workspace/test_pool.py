"""Trees that wait for a chat: adopted once, by a new chat, and swept after a killed process."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.beneath import rename_new
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import SUBDIRECTORIES
from mcp_sandbox.workspace.pool import PoolFolder, WarmTrees
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("ann", "c1")
OWNER = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=OWNER)
SETTINGS = WorkspaceConfig(
    subdirectories=True, aliases=("/mnt/work", "/mnt/user-data/uploads=uploads")
)


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncGenerator[PoolFolder]:
    opened = PoolFolder(tmp_path / "data", users=USERS, settings=SETTINGS)
    await opened.open()
    yield opened
    await opened.aclose()


async def settled(folder: PoolFolder) -> WarmTrees:
    return await folder.settle(await folder.prepare())


def kept(data: Path, kind: str) -> list[str]:
    return sorted(
        str(path.relative_to(data / "sandbox" / kind)) for path in data.glob(f"sandbox/{kind}/*/*")
    )


async def test_adopted_trees_are_the_ones_that_the_chat_opens(
    folder: PoolFolder, tmp_path: Path
) -> None:
    assert folder.usable
    warm = await settled(folder)
    held = os.open(warm.directories.workspace, os.O_RDONLY)
    await folder.adopt(warm, CHAT)
    adopted = await Workspaces(tmp_path / "data", users=USERS, settings=SETTINGS).open(CHAT)
    assert os.fstat(held).st_ino == adopted.workspace.stat().st_ino
    os.close(held)
    assert sorted(path.name for path in adopted.workspace.iterdir()) == sorted(
        (*SUBDIRECTORIES, "uploads")
    )
    for tree in (adopted.workspace, adopted.home):
        assert (tree.stat().st_uid, tree.stat().st_mode & 0o777) == (OWNER[0], 0o700)
    await folder.discard(warm)
    assert not list((tmp_path / "data/sandbox/pool").glob("*/*/*"))


async def test_a_chat_that_has_files_adopts_nothing(folder: PoolFolder, tmp_path: Path) -> None:
    warm = await settled(folder)
    mine = await Workspaces(tmp_path / "data", users=USERS).open(CHAT)
    (mine.workspace / "file").write_text("mine")
    with pytest.raises(StorageUnavailable):
        await folder.adopt(warm, CHAT)
    assert (mine.workspace / "file").read_text() == "mine"


async def test_not_even_empty_trees_of_a_chat_are_replaced(
    folder: PoolFolder, tmp_path: Path
) -> None:
    mine = await Workspaces(tmp_path / "data", users=USERS).open(CHAT)
    with pytest.raises(StorageUnavailable):
        await folder.adopt(await settled(folder), CHAT)
    assert mine.workspace.stat().st_ino == mine.workspace_inode


async def test_trees_are_adopted_once(folder: PoolFolder) -> None:
    warm = await settled(folder)
    await folder.adopt(warm, CHAT)
    with pytest.raises(StorageUnavailable):
        await folder.adopt(warm, ChatId("bob", "c2"))


async def test_no_warm_trees_where_aliases_name_the_chat(tmp_path: Path) -> None:
    settings = WorkspaceConfig(aliases=("/mnt/{chat}",))
    assert not PoolFolder(tmp_path / "data", users=USERS, settings=settings).usable


async def test_closing_leaves_nothing(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    folder = PoolFolder(tmp_path / "data", users=USERS)
    await folder.open()
    (await settled(folder)).directories.workspace.joinpath("file").write_text("x")
    await folder.prepare()
    await folder.aclose()
    for name in ("pool", "trash"):
        assert list((tmp_path / "data" / "sandbox" / name).iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_a_living_process_keeps_its_folder(folder: PoolFolder, tmp_path: Path) -> None:
    warm = await settled(folder)
    other = PoolFolder(tmp_path / "data", users=USERS)
    assert await to_thread.run_sync(other.abandoned) == frozenset()
    await to_thread.run_sync(other.remove, warm.label.partition("/")[0])
    assert warm.directories.workspace.is_dir()


KILLED = """
import os, signal, sys, anyio
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.pool import PoolFolder
from mcp_sandbox.workspace.users import SandboxUsers
folder = PoolFolder(Path(sys.argv[1]), users=SandboxUsers(one=(int(sys.argv[2]), int(sys.argv[3]))))
async def main():
    await folder.open()
    new, waiting, adopted = [await folder.prepare() for _ in range(3)]
    waiting, adopted = await folder.settle(waiting), await folder.settle(adopted)
    await folder.adopt(adopted, ChatId("ann", "c1"))
    print(new.label, waiting.label, adopted.label, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""


def test_what_a_killed_process_left_is_told_from_what_a_chat_adopted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(data), *map(str, OWNER)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    new, waiting, adopted = ended.stdout.split()
    other = PoolFolder(data, users=USERS)
    (process,) = other.abandoned()
    assert [other.keeps(label) for label in (new, waiting, adopted)] == [True, True, False]
    assert not other.keeps("../../workspace/ann")
    other.remove(process)
    assert other.abandoned() == frozenset()
    assert kept(data, "pool") == []
    assert kept(data, "workspace") == kept(data, "home") == ["ann/chat-c1"]


def test_a_rename_never_replaces(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(FileExistsError):
        rename_new(root, b"a", root, b"b")
    rename_new(root, b"a", root, b"c")
    os.close(root)
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
