"""Each chat's sandbox has a user of its own, so what the kernel counts by user no other lacks."""

import os
import pwd
import shutil
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, PoolConfig, ProjectConfig
from mcp_sandbox.config.sections import SandboxConfig
from mcp_sandbox.errors import CapacityReached
from mcp_sandbox.models import PENDING_SIGNALS, ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.workspace.projects import ClientFolders
from mcp_sandbox.workspace.users import find_range
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
ANN, BEN = ChatId("ann", "c1"), ChatId("ben", "c1")
OLD = 10001


@pytest.fixture(params=[DOCKER, GVISOR, BUBBLEWRAP], scope="module")
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trees(data_root: Path, chat: ChatId = ANN) -> Mapping[str, Path]:
    places = (data_root / "sandbox" / kind for kind in ("workspace", "home", "project"))
    found = (place / chat.user / f"chat-{chat.chat}" for place in places)
    return {tree.parts[-3]: tree for tree in found if tree.exists()}


def uids(data_root: Path, chat: ChatId = ANN) -> set[int]:
    return {tree.stat().st_uid for tree in trees(data_root, chat).values()}


def owners(tree: Path) -> set[int]:
    return {path.lstat().st_uid for path in (tree, *tree.rglob("*"))}


async def said(session: Session, command: str) -> str:
    result = await session.exec(command, timeout_s=60)
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return result.stdout.strip()


async def test_each_chat_has_a_user_of_its_own_and_a_name(
    manager: SessionManager, config: Config
) -> None:
    numbers = find_range(config.data_dir)
    assert numbers
    assert len(numbers) == 1 << 16
    assert not any(each.pw_uid in numbers for each in pwd.getpwall())
    seen = set[int]()
    for chat in (ANN, BEN):
        session = await manager.session(chat)
        told = (
            await said(session, f'id -u; id -g; whoami; id -gn; python3 -c "{OF_FILE}"')
        ).split()
        assert told[2:] == ["sandbox"] * 4
        assert uids(config.data_dir, chat) == {int(told[0])} == {int(told[1])}
        assert f"uid {told[0]}" in (await session.info()).isolation
        seen.add(int(told[0]))
    assert len(seen) == 2
    assert seen < set(numbers)


OF_FILE = (
    "import grp, os, pwd; open('x', 'w').close(); found = os.stat('x'); "
    "print(pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid).gr_name)"
)
HOARD = {
    "inotify instances": """
import ctypes, os
libc, took = ctypes.CDLL(None), 0
while libc.inotify_init() >= 0:
    took += 1
""",
    "pending signals": """
import ctypes, os, signal
libc, took = ctypes.CDLL(None), 0
if not os.fork():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    print("child", flush=True)
    signal.pause()
import time
child = int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0])
while libc.sigqueue(child, signal.SIGRTMIN, None) == 0 and took < 1_000_000:
    took += 1
""",
    "pipe pages": """
import fcntl, os
took, kept = 0, []
while took < 64:
    ends = os.pipe()
    try:
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, 1 << 20)
    except OSError:
        break
    kept.append(ends)
    took += 1
""",
}
USE = {
    "inotify instances": "import ctypes, sys; sys.exit(ctypes.CDLL(None).inotify_init() < 0)",
    "pending signals": (
        "import ctypes, os, signal, sys; signal.pthread_sigmask(0, [signal.SIGRTMIN]); "
        "sys.exit(ctypes.CDLL(None).sigqueue(os.getpid(), signal.SIGRTMIN, None) != 0)"
    ),
    "pipe pages": ("import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)"),
}


# gVisor counts for itself.
@pytest.mark.parametrize("backend_name", [DOCKER, BUBBLEWRAP], indirect=True)
@pytest.mark.parametrize("what", HOARD)
async def test_what_one_chat_takes_all_of_another_still_has(
    manager: SessionManager, what: str
) -> None:
    ann, ben = await manager.session(ANN), await manager.session(BEN)
    assert await said(ben, "ulimit -i") == str(PENDING_SIGNALS)
    code = f"{HOARD[what]}\nprint('took', took, flush=True)\nimport signal; signal.pause()"
    await ann.write_file("hoard.py", code)
    hoarding = await ann.exec("exec python3 hoard.py", until="took", timeout_s=60)
    assert "took" in hoarding.stdout, hoarding
    result = await ben.exec(f'python3 -c "{USE[what]}"')
    assert result.exit_code == 0, (what, hoarding.stdout, result.stderr)


def make_old(data_root: Path, chat: ChatId = ANN) -> None:
    """Make a chat's trees as a server made them whose sandboxes had one user."""
    for tree in trees(data_root, chat).values():
        for path in (tree, *tree.rglob("*")):
            os.chown(path, OLD, OLD, follow_symlinks=False)


async def test_an_old_chat_moves_at_its_next_start_and_nothing_else_does(
    config: Config, tmp_path: Path
) -> None:
    mine, linked = tmp_path / "mine", tmp_path / "linked"
    for path in (mine, linked):
        path.write_text("of the host")
        path.chmod(0o600)
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        await said(
            session, "mkdir -p a/b ~/c; echo text > a/b/f; echo 1 > ~/c/g; chmod 0 a/b; chmod 0 ."
        )
    workspace = trees(config.data_dir)["workspace"]
    make_old(config.data_dir)
    for name, target in (("out", str(mine)), ("up", "../../../../..")):
        (workspace / name).symlink_to(target)
        os.chown(workspace / name, OLD, OLD, follow_symlinks=False)
    os.link(linked, workspace / "hard")
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        told = await said(session, "id -u; chmod 700 . a/b; cat a/b/f ~/c/g; echo 2 > a/b/f")
        [notice] = await session.take_notices()
        assert "Given to a user of this chat alone: " in notice
        assert told.split()[1:] == ["text", "1"]
        assert uids(config.data_dir) == {int(told.split()[0])}
        assert int(told.split()[0]) in (find_range(config.data_dir) or ())
        assert owners(workspace) == {*uids(config.data_dir), 0}
    assert mine.stat().st_uid == linked.stat().st_uid == 0
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        assert await said(session, "id -u") == told.split()[0]
        assert not await session.take_notices()


async def test_a_warm_sandbox_is_born_with_a_user_that_its_chat_keeps(config: Config) -> None:
    async with open_manager(config.model_copy(update={"pool": PoolConfig(size=1)})) as manager:
        with anyio.fail_after(60):
            while not manager.statistics().pool["idle"]:
                await anyio.sleep(0.02)
        session = await manager.session(ANN)
        told = int(await said(session, "id -u"))
        assert manager.statistics().pool["hits"] == 1
        assert uids(config.data_dir) == {told}
    async with open_manager(config) as manager:
        assert int(await said(await manager.session(ANN), "echo x > x; id -u")) == told


async def test_files_from_the_trash_and_new_ones_are_the_chats(config: Config) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        told = await said(session, "echo kept > kept; id -u")
        await session.reset(keep_files=False)
        assert await said(session, "ls; id -u; touch new ~/new") == told
        await manager.remove(ANN)
        again = await said(await manager.session(ANN), "id -u")
        assert again != told
    [item] = (config.data_dir / "sandbox" / "trash").glob("*/workspace/kept")
    workspace = trees(config.data_dir)["workspace"]
    workspace.rmdir()
    item.parent.rename(workspace)
    async with open_manager(config) as manager:
        assert (
            await said(await manager.session(ANN), "cat kept; id -u; touch ~/x") == f"kept\n{told}"
        )
        assert uids(config.data_dir) == {int(told)}


on_bubblewrap = pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)


@on_bubblewrap
async def test_a_range_that_is_used_up_is_told_and_no_user_is_shared(config: Config) -> None:
    first = (1 << 30) + os.getpid() * 4
    users = SandboxConfig(uid_range=f"{first}-{first + 1}")
    async with open_manager(config.model_copy(update={"sandbox": users})) as manager:
        for chat in (ANN, BEN):
            await said(await manager.session(chat), "touch x")
        assert uids(config.data_dir, ANN) | uids(config.data_dir, BEN) == {first, first + 1}
        third = await manager.session(ChatId("cleo", "c1"))
        with pytest.raises(CapacityReached, match=rf"\({first}-{first + 1}\) belong.*uid_range"):
            await third.exec("true")
        freed = uids(config.data_dir, ANN)
        await manager.remove(ANN)
        with pytest.raises(CapacityReached, match=r"in the trash.*mcp-sandbox gc"):
            await third.exec("true")
        [item] = (config.data_dir / "sandbox" / "trash").iterdir()
        assert item.joinpath("workspace").stat().st_uid in freed
        shutil.rmtree(item)
        assert {int(await said(third, "id -u"))} == freed


@on_bubblewrap
async def test_files_under_a_sandbox_that_runs_stay_and_move_at_the_next_start(
    config: Config,
) -> None:
    as_before = config.model_copy(update={"project": ProjectConfig(access="rw")})
    async with open_manager(as_before) as before:
        held = await before.session(ANN)
        assert await said(held, "echo 1 > f; id -u") == str(OLD)
        async with open_manager(config) as after:
            session = await after.session(ANN)
            assert await said(session, "cat f; id -u") == f"1\n{OLD}"
            assert await said(held, "echo 2 > f; cat f") == "2"
            assert uids(config.data_dir) == {OLD}
    async with open_manager(config) as after:
        told = await said(await after.session(ANN), "cat f; echo 3 > f; id -u")
        assert told == f"2\n{uids(config.data_dir).pop()}"
    async with open_manager(as_before) as before:
        assert await said(await before.session(ANN), "cat f; id -u") == f"3\n{OLD}"


@on_bubblewrap
async def test_a_copy_of_the_project_is_the_chats_and_the_folder_itself_is_as_before(
    config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "file").write_text("text")
    folders = ClientFolders()
    for access in ("copy", "rw"):
        project = ProjectConfig.model_validate({"access": access})
        chat = ChatId("ann", access)
        with folders.bring(chat, folder):
            changed = config.model_copy(update={"project": project})
            async with open_manager(changed, folders) as manager:
                told = await said(await manager.session(chat), "id -u; cat /project/file")
        uid = int(told.split()[0])
        assert told.split()[1] == "text"
        assert (uid == OLD) == (access == "rw")
        assert set().union(*map(owners, trees(config.data_dir, chat).values())) == {uid}
    assert owners(folder) == {0}
