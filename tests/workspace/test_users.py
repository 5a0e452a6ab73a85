"""Which user each chat's trees belong to, on the real disk."""

import os
import signal
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from mcp_sandbox.errors import CapacityReached, ConfigError, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import ChatDirectories, Workspaces
from mcp_sandbox.workspace.pool import PoolFolder
from mcp_sandbox.workspace.users import SandboxUsers, find_range, open_users

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
CHAT, OLD = ChatId("ann", "c1"), (10001, 10001)
FIRST = 1 << 30

MOVER = """
import os, signal, sys, anyio
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.users import SandboxUsers
left = int(sys.argv[2])
def note(event, arguments):
    global left
    if event == "os.chown":
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(note)
root = Path(sys.argv[1])
workspaces = Workspaces(root, users=SandboxUsers(range(1 << 30, (1 << 30) + 9)))
async def main():
    chat = ChatId("ann", "c1")
    print((await workspaces.open(chat)).astray, await workspaces.unite(chat))
anyio.run(main)
"""


def uids(tree: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    for path in (tree, *tree.rglob("*")):
        uid = path.lstat().st_uid
        found[uid] = found.get(uid, 0) + 1
    return found


def users(root: Path, count: int = 9) -> SandboxUsers:
    (root / "sandbox").mkdir(parents=True, exist_ok=True)
    return SandboxUsers(range(FIRST, FIRST + count))


async def make_old_chat(root: Path, files: int) -> ChatDirectories:
    opened = await Workspaces(root, users=SandboxUsers(one=OLD)).open(CHAT)
    for number in range(files):
        folder = opened.workspace / f"{number % 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"file-{number}").touch()
    (opened.home / "last").touch()
    for path in (*opened.workspace.rglob("*"), opened.home / "last"):
        os.chown(path, *OLD)
    return opened


async def test_a_move_that_is_killed_again_and_again_goes_on_with_the_same_user(
    tmp_path: Path,
) -> None:
    opened = await make_old_chat(tmp_path, 10_000)
    theirs = opened.workspace / "theirs"
    theirs.touch()
    os.chown(theirs, 4242, 4242)
    for left, moved in ((5000, 4998), (1, 4998), (3000, 7997)):
        command = [sys.executable, "-c", MOVER, str(tmp_path), str(left)]
        killed = await anyio.run_process(command, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        # The first gave the workspace itself, and the last was not made any more.
        assert uids(opened.workspace)[FIRST] == moved + 1
        assert opened.home.stat().st_uid == 10001
    done = await anyio.run_process([sys.executable, "-c", MOVER, str(tmp_path), "0"])
    assert done.stdout.decode() == f"True {10_101 - 7997}\n"
    assert uids(opened.workspace) == {FIRST: 10_101, 4242: 1}
    assert uids(opened.home) == {FIRST: 2}
    assert not (await Workspaces(tmp_path, users=users(tmp_path)).open(CHAT)).astray


async def test_a_chat_that_is_reset_in_the_middle_of_its_move_moves_whole(tmp_path: Path) -> None:
    await make_old_chat(tmp_path, 100)
    command = [sys.executable, "-c", MOVER, str(tmp_path), "50"]
    assert (await anyio.run_process(command, check=False)).returncode == -signal.SIGKILL
    workspaces = Workspaces(tmp_path, users=users(tmp_path))
    await workspaces.discard(CHAT)
    assert (await workspaces.open(CHAT)).astray
    await workspaces.unite(CHAT)
    opened = await workspaces.open(CHAT)
    assert not opened.astray
    own = opened.workspace.stat().st_uid
    assert set(uids(opened.workspace)) == set(uids(opened.home)) == {own}


async def test_an_old_workspace_in_the_place_of_a_new_one_moves_whole(tmp_path: Path) -> None:
    opened = await make_old_chat(tmp_path, 100)
    for path in (opened.home, *opened.home.rglob("*")):
        os.chown(path, FIRST + 5, FIRST + 5)
    command = [sys.executable, "-c", MOVER, str(tmp_path), "50"]
    assert (await anyio.run_process(command, check=False)).returncode == -signal.SIGKILL
    done = await anyio.run_process([*command[:-1], "0"])
    assert done.stdout.decode() == f"True {200 - 49}\n"
    assert set(uids(opened.workspace)) == set(uids(opened.home)) == {FIRST + 5}


TAKER = """
import sys, anyio
from pathlib import Path
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.users import SandboxUsers
root = Path(sys.argv[1])
workspaces = Workspaces(root, users=SandboxUsers(range(1 << 30, (1 << 30) + 200)))
async def main():
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(workspaces.open, ChatId(sys.argv[2], f"c{number}"))
anyio.run(main)
"""


async def test_servers_that_make_chats_at_once_give_no_user_twice(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        for user in ("ann", "ben"):
            command = [sys.executable, "-c", TAKER, str(tmp_path), user]
            tasks.start_soon(anyio.run_process, command)
    found = [tree.stat().st_uid for tree in (tmp_path / "sandbox" / "workspace").glob("*/*")]
    assert sorted(found) == list(range(FIRST, FIRST + 200))
    # After a power cut, which has taken the newest note, or all of it.
    for note in (f"range({FIRST}, {FIRST + 200});before;{FIRST};{FIRST + 200};", "?", ""):
        (tmp_path / "sandbox" / "users.lock").write_text(note)
        with pytest.raises(CapacityReached):
            await Workspaces(tmp_path, users=users(tmp_path, 200)).open(ChatId("cleo", "c1"))


async def test_a_user_is_free_when_nothing_is_left_of_the_chat(tmp_path: Path) -> None:
    given = users(tmp_path, 3)
    workspaces, pool = Workspaces(tmp_path, users=given), PoolFolder(tmp_path, users=given)
    await pool.open()
    warm = await pool.prepare()
    await workspaces.stage(CHAT)
    await workspaces.open(ChatId("ben", "c1"))
    await workspaces.remove(ChatId("ben", "c1"))
    with pytest.raises(CapacityReached, match=f"{FIRST}-{FIRST + 2}"):
        await workspaces.open(ChatId("cleo", "c1"))
    await pool.discard(warm)
    opened = await workspaces.open(ChatId("cleo", "c1"))
    assert opened.user == (FIRST, FIRST) == warm.directories.user
    await pool.aclose()


def test_data_roots_have_ranges_apart_that_stay_theirs(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in (*roots, *roots):
        open_users(root, "")
    one, two = map(find_range, roots)
    assert one
    assert two
    assert len(one) == len(two) == 65_536
    assert not set(one) & set(two)
    # Those of earlier runs are on this machine's list, too.
    start = 1_800_000_000 + os.getpid() * 20
    last = start + 9
    assert open_users(roots[0], f"{start}-{last}").find(last) == (last, last)
    assert find_range(roots[0]) == one


async def test_a_copy_of_a_data_root_gets_users_of_its_own_and_its_chats_move(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    given = await anyio.to_thread.run_sync(open_users, one, "")
    first = await Workspaces(one, users=given).open(CHAT)
    (first.workspace / "file").touch()
    os.chown(first.workspace / "file", *(first.user or OLD))
    await anyio.run_process(["cp", "-a", str(one), str(two)])
    users = await anyio.to_thread.run_sync(open_users, two, "")
    assert not set(users.numbers) & set(find_range(one) or ())
    workspaces = Workspaces(two, users=users)
    assert (await workspaces.open(CHAT)).astray
    await workspaces.unite(CHAT)
    [own] = uids((await workspaces.open(CHAT)).workspace)
    assert own in users.numbers
    # Under another name, or after a restart, each keeps its own.
    (tmp_path / "again").symlink_to(two)
    for root in (one, two, tmp_path / "again", one):
        wanted = first.user[0] if root == one and first.user else users.numbers[0]
        assert (await anyio.to_thread.run_sync(open_users, root, "")).find(wanted)


@pytest.mark.parametrize("user", ["skills", "pool", "trash", "home"])
async def test_a_user_is_found_whatever_their_name(tmp_path: Path, user: str) -> None:
    workspaces = Workspaces(tmp_path, users=users(tmp_path))
    first = await workspaces.open(ChatId(user, "c1"))
    # As after a boot.
    (tmp_path / "sandbox" / "users.lock").write_text("")
    assert (await workspaces.open(CHAT)).user != first.user


async def test_no_number_is_given_while_it_cannot_be_seen_whose_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces = Workspaces(tmp_path, users=users(tmp_path))
    await workspaces.open(CHAT)
    (tmp_path / "sandbox" / "users.lock").write_text("")
    monkeypatch.setattr("mcp_sandbox.workspace.meter.walk", lambda *_: False)
    with pytest.raises(StorageUnavailable, match="could not be seen"):
        await workspaces.open(ChatId("ann", "c2"))
    monkeypatch.undo()
    assert (await workspaces.open(ChatId("ann", "c2"))).user == (FIRST + 1, FIRST + 1)


def test_a_range_that_another_data_root_has_is_refused_and_noted(tmp_path: Path) -> None:
    one, two, three = [tmp_path / name for name in ("one", "two", "three")]
    picked = open_users(one, "").numbers
    with pytest.raises(ConfigError, match=f"{one} has the user ids"):
        open_users(two, f"{picked.start + 5}-{picked.start + 9}")
    # Those of earlier runs are on this machine's list, too.
    start = 1_900_000_000 + os.getpid() * 20
    wanted, found = f"{start}-{start + 9}", range(start, start + 10)
    assert open_users(two, wanted).numbers == found
    # Again, as after a restart, and beside it.
    assert open_users(two, wanted).numbers == found
    with pytest.raises(ConfigError, match=f"{two} has the user ids"):
        open_users(three, f"{start + 9}-{start + 20}")
    assert open_users(three, f"{start + 10}-{start + 19}").numbers.start == start + 10
