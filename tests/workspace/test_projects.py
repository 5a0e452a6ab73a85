"""The user's project folder: which may be shown, and what a copy of it holds."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import ProjectConfig
from mcp_sandbox.errors import ConfigError, InvalidArgument
from mcp_sandbox.models import ChatId, Mount
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.projects import ClientFolders, Projects, check_folder
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("me", "work")
ME = (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=ME)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "project"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def projects(tmp_path: Path, folders: ClientFolders, **settings: object) -> Projects:
    chosen = ProjectConfig.model_validate(settings)
    return Projects(chosen, Workspaces(tmp_path / "data", users=USERS), folders)


async def mounts(tmp_path: Path, folder: Path, **settings: object) -> tuple[Mount, ...]:
    folders = ClientFolders()
    with anyio.fail_after(20), folders.bring(CHAT, folder):
        return (await projects(tmp_path, folders, **settings).show(CHAT, {})).mounts


async def copied(tmp_path: Path, project: Path, **settings: object) -> Path:
    (mount,) = await mounts(tmp_path, project, access="copy", **settings)
    assert (mount.target, mount.read_only) == ("/project", False)
    return mount.source


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(("access", "read_only"), [("ro", True), ("rw", False)])
async def test_the_folder_is_mounted_as_the_operator_says(
    access: str, read_only: bool, tmp_path: Path, project: Path
) -> None:
    found = await mounts(tmp_path, project, access=access)
    assert found == (Mount(project, "/project", read_only=read_only),)


async def test_by_default_nothing_of_the_host_is_shown(tmp_path: Path, project: Path) -> None:
    assert await mounts(tmp_path, project) == ()


async def test_a_folder_is_shown_to_its_chat_while_its_client_is_there(
    tmp_path: Path, project: Path
) -> None:
    folders = ClientFolders()
    known = projects(tmp_path, folders, access="ro")
    with folders.bring(CHAT, project):
        assert (await known.show(CHAT, {})).mounts
        assert (await known.show(ChatId("me", "other"), {})).mounts == ()
    assert (await known.show(CHAT, {})).mounts == ()


def test_of_several_clients_the_last_one_that_is_there_counts() -> None:
    folders, first, second = ClientFolders(), Path("/first"), Path("/second")
    with folders.bring(CHAT, first), folders.bring(CHAT, None):
        with folders.bring(CHAT, second):
            assert folders.of(CHAT) == second
        assert folders.of(CHAT) == first
    assert folders.of(CHAT) is None


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/", "whole home|belongs to"),
        ("{home}", "whole home"),
        ("{home}/..", "whole home"),
        ("/etc", "part of the system|belongs to"),
        ("/proc/self", "part of the system|belongs to"),
        ("{data}", "the server's own"),
        ("{data}/sandbox/workspace", "the server's own"),
        ("{home}/around", "the server's own"),
        ("{home}/file", "not a folder"),
        ("{home}/absent", "cannot be used"),
        ("{home}/loop", "cannot be used"),
        ("{home}/link-home", "whole home"),
    ],
)
def test_what_must_stay_out_is_refused(
    folder: str, why: str, tmp_path: Path, project: Path
) -> None:
    home, data = project.parent, tmp_path / "data"
    (data / "sandbox" / "workspace").mkdir(parents=True)
    (home / "around" / "state").mkdir(parents=True)
    (home / "file").touch()
    (home / "loop").symlink_to("loop")
    (home / "link-home").symlink_to(".")
    with pytest.raises(InvalidArgument, match=why):
        check_folder(Path(folder.format(home=home, data=data)), (data, home / "around" / "state"))


def test_a_link_is_followed_once_and_its_end_is_what_counts(tmp_path: Path, project: Path) -> None:
    (tmp_path / "home" / "link").symlink_to("project")
    assert check_folder(tmp_path / "home" / "link", ())[-1][0] == project


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(project: Path) -> None:
    os.chown(project, 12345, 12345)
    with pytest.raises(InvalidArgument, match="belongs to uid 12345"):
        check_folder(project, ())


async def test_a_refused_folder_leaves_the_chat_without_one(
    tmp_path: Path, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await mounts(tmp_path, project.parent, access="rw") == ()
    assert "works without its folder" in caplog.text


async def test_a_copy_holds_what_git_would_look_at(tmp_path: Path, project: Path) -> None:
    files = {
        ".gitignore": "*.log\n/build/\nnode_modules\n!kept.log\n",
        "sub/deep/.gitignore": "!b.log\n*.tmp\n",
    }
    kept = ("main.py", "kept.log", "sub/build/in", "sub/deep/b.log")
    left = ("a.log", "build/out", "sub/node_modules/x", ".git/HEAD", "sub/deep/c.tmp")
    write(project, files | dict.fromkeys(kept + left, ""))
    assert names(await copied(tmp_path, project)) == [
        ".gitignore",
        "kept.log",
        "main.py",
        "sub",
        "sub/build",
        "sub/build/in",
        "sub/deep",
        "sub/deep/.gitignore",
        "sub/deep/b.log",
    ]


async def test_a_copy_follows_no_link_out(tmp_path: Path, project: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("s3cret")
    write(project, {"sub/file": "inside"})
    for name, text in (
        ("absolute", str(secret / "key")),
        ("out", "../../secret"),
        ("sub/out", "../../../secret/key"),
        ("inside", "sub/file"),
        ("sub/back", "../sub/file"),
    ):
        (project / name).symlink_to(text)
    os.mkfifo(project / "pipe")
    (project / ".gitignore").symlink_to(secret / "key")
    copy = await copied(tmp_path, project)
    assert names(copy) == ["inside", "sub", "sub/back", "sub/file"]
    assert (copy / "inside").read_text() == "inside"


async def test_a_copy_keeps_rights_and_times_and_is_made_once(
    tmp_path: Path, project: Path
) -> None:
    write(project, {"run.sh": "#!"})
    (project / "run.sh").chmod(0o555)
    os.utime(project / "run.sh", ns=(1, 10**18))
    copy = await copied(tmp_path, project)
    found = (copy / "run.sh").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o755, 10**18)
    (copy / "run.sh").write_text("changed by the chat")
    (project / "later").touch()
    assert await copied(tmp_path, project) == copy
    assert names(copy) == ["run.sh"]
    assert (copy / "run.sh").read_text() == "changed by the chat"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_size": "1m"}, "more than 1,048,576 bytes"),
        ({"max_files": 2}, "more than 2 files"),
    ],
)
async def test_a_copy_over_its_limits_is_not_made_and_nothing_stays(
    settings: dict[str, object], why: str, tmp_path: Path, project: Path
) -> None:
    for number in range(3):
        (project / str(number)).write_bytes(bytes(700_000))
    with pytest.raises(ConfigError, match=why) as told:
        await copied(tmp_path, project, **settings)
    assert "raise project.max_size" in str(told.value)
    assert list((tmp_path / "data" / "sandbox" / "project" / "me" / "chat-work").iterdir()) == []


@pytest.mark.slow
async def test_a_copy_that_takes_for_ever_is_given_up(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.workspace.projects._COPY_S", 2.0)
    # Each rule takes little time, and they are many.
    (project / ".gitignore").write_text("*a*b\n" * 50_000)
    for number in range(500):
        (project / f"{number}").touch()
    with pytest.raises(ConfigError, match="took longer than 2 s"):
        await copied(tmp_path, project)


PUMPED = {
    "*a" * 100 + "b": "a" * 250,
    "**/a" * 40 + "/b": "/".join("a" * 90),
    "a/**/" * 40 + "b": "/".join("a" * 90),
    "*a*/" * 20 + "b": "/".join(["a" * 30] * 60),
    "?*" * 80 + "b": "a" * 250,
    "[ab]*" * 60 + "c": "ab" * 120,
    "a**" * 60 + "b/": "a" * 250,
}


@pytest.mark.parametrize("rule", PUMPED, ids=lambda rule: rule[:9])
async def test_a_rule_of_many_wildcards_takes_no_time(
    tmp_path: Path, project: Path, rule: str
) -> None:
    (project / ".gitignore").write_text(rule + "\n!" + rule + "\n")
    path = project / PUMPED[rule]
    path.mkdir(parents=True)
    with anyio.fail_after(15):
        copy = await copied(tmp_path, project)
    assert (copy / PUMPED[rule]).is_dir()


async def test_rules_of_many_wildcards_mean_what_they_mean_to_git(
    tmp_path: Path, project: Path
) -> None:
    files = ["xaybz", "xbya", "abab.c", "d/xaybz", "p/q/r/s/t", "p/s/t", "p/r/s", "q/r/q/r/s"]
    for name in files:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    (project / ".gitignore").write_text("*a*b*z\n*b*b*.c\np/**/r/**/t\nq/**/r/s\n")
    given = ["git", "-C", str(project)]
    await anyio.run_process([*given, "init", "-q"])
    asked = "\0".join(files).encode()
    found = await anyio.run_process(
        [*given, "check-ignore", "-z", "--stdin"], input=asked, check=False
    )
    ignored = {*found.stdout.decode().split("\0")} - {""}
    copy = await copied(tmp_path, project)
    assert {name for name in files if not (copy / name).exists()} == ignored
    assert ignored == {"xaybz", "abab.c", "d/xaybz", "p/q/r/s/t", "q/r/q/r/s"}


async def test_two_folders_of_one_chat_are_two_copies(tmp_path: Path, project: Path) -> None:
    other = project.parent / "other"
    other.mkdir()
    assert await copied(tmp_path, project) != await copied(tmp_path, other)


async def test_what_a_killed_copier_left_is_removed(tmp_path: Path, project: Path) -> None:
    copy = await copied(tmp_path, project)
    left = copy.with_name(f"{copy.name}.1.partial")
    left.mkdir()
    copy.rmdir()
    assert await copied(tmp_path, project) == copy
    assert not left.exists()


async def test_a_copy_counts_as_the_chats_and_goes_with_it(tmp_path: Path, project: Path) -> None:
    (project / "big").write_bytes(os.urandom(500_000))
    copy = await copied(tmp_path, project)
    workspaces = Workspaces(tmp_path / "data", users=USERS)
    await workspaces.open(CHAT)
    assert (await workspaces.open_disk_usage(CHAT).usage()).used_bytes > 500_000
    await workspaces.remove(CHAT)
    assert not copy.parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize(
    ("differs", "asks"),
    [
        ({}, False),
        ({"boot": "earlier", "device": -1}, False),
        ({"boot": "earlier", "inode": -1}, True),
        ({"device": -1}, True),
        ({"inode": -1, "owners": [4321]}, False),
    ],
)
async def test_a_folder_is_another_by_its_inode_and_in_one_boot_by_its_device(
    differs: dict[str, object], asks: bool, tmp_path: Path, project: Path
) -> None:
    link, folders = tmp_path / "link", ClientFolders()
    link.symlink_to(project)
    os.lchown(link, 4321, 4321)
    known = projects(tmp_path, folders, access="ro")
    with folders.bring(CHAT, link):
        mark = (await known.show(CHAT, {})).noted[str(link)]["known"]
        assert (mark["owners"], mark["inode"]) == ([4321], project.stat().st_ino)
        before = {**mark, "owners": [], **differs}
        shown = await known.show(CHAT, {str(link): {"known": before}})
    assert bool(shown.question) == asks
    assert bool(shown.mounts) != asks
    assert ("asked" in shown.noted[str(link)]) == asks
