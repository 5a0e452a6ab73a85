"""Whole files, whole folders and locks."""

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcp_sandbox import durable
from mcp_sandbox.durable import (
    check_trusted,
    follow,
    lock,
    publish_folder,
    read_note,
    unlock,
    write_file,
    write_note,
)


def test_a_file_is_replaced_as_a_whole_and_no_draft_stays(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        write_file(tmp_path / "note", text)
    assert (tmp_path / "note").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["note"]


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "note").mkdir()
    with pytest.raises(OSError, match="note"):
        write_file(tmp_path / "note", b"new")
    assert os.listdir(tmp_path) == ["note"]


def test_a_name_that_is_taken_keeps_its_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert publish_folder(tmp_path / "first", tmp_path / "target")
    assert not publish_folder(tmp_path / "second", tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "first"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mcp_sandbox.durable import lock;"
        "lock(Path(sys.argv[1]), wait=True); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "lock"], stdin=pipe, stdout=pipe
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"\n"
        assert lock(tmp_path / "lock", wait=False) is None
        holder.kill()
    ours = lock(tmp_path / "lock", wait=False)
    assert ours is not None
    unlock(ours)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_note_is_told_apart_from_none(tmp_path: Path, text: bytes) -> None:
    assert read_note(tmp_path / "note") is None
    (tmp_path / "note").write_bytes(text)
    with pytest.raises(ValueError):  # noqa: PT011 - its words are json's
        read_note(tmp_path / "note")


def test_a_note_is_written_also_where_a_folder_lies(tmp_path: Path) -> None:
    (tmp_path / "note").mkdir()
    with pytest.raises(ValueError, match="directory"):
        read_note(tmp_path / "note")
    write_note(tmp_path / "note", {"a": 1})
    assert read_note(tmp_path / "note") == {"a": 1}
    (aside,) = tmp_path.glob("note.damaged-*")
    assert aside.is_dir()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_file_and_its_name_are_synced_in_this_order(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from mcp_sandbox.durable import make_folder, write_note;"
        "make_folder(Path(sys.argv[1], 'a', 'b')); write_note(Path(sys.argv[1], 'a', 'b', 'n'), {})"
    )
    command = [
        "strace",
        "-y",
        "-e",
        "trace=write,fsync,rename,mkdir",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    steps = [re.sub(rf".*?(\w+)\(.*?{tmp_path}([^>\"]*).*", r"\1 \2", line) for line in lines]
    steps = [re.sub(r"\.n\..*", "draft", step) for step in steps if "exit" not in step]
    assert steps == [
        "mkdir /a",
        "fsync ",
        "mkdir /a/b",
        "fsync /a",
        "write /a/b/draft",
        "fsync /a/b/draft",
        "rename /a/b/draft",
        "fsync /a/b",
    ]


@pytest.fixture
def own_group(tmp_path: Path) -> Path:
    """A folder of the group of this user alone, as root's is."""
    (tmp_path / "above" / "folder").mkdir(parents=True, mode=0o700)
    (tmp_path / "above" / "folder" / "file").touch(0o600)
    (tmp_path / "link").symlink_to("above/../above/folder")
    return tmp_path


@pytest.mark.parametrize(
    ("place", "mode", "says"),
    [
        ("above/folder/file", 0o606, "chmod go-w {}"),
        ("above/folder/file", 0o660, ""),
        ("above/folder", 0o703, "chmod go-w {}"),
        ("above/folder", 0o777, "chmod go-w {}"),
        ("above", 0o777, "chmod go-w {}"),
        ("above", 0o1777, ""),
        ("above", 0o755, ""),
    ],
)
def test_what_others_can_change_is_not_trusted(
    place: str, mode: int, says: str, own_group: Path
) -> None:
    (own_group / place).chmod(mode)
    file = own_group / "link" / "file"
    if not says:
        return check_trusted(file)
    with pytest.raises(PermissionError, match=re.escape(says.format(own_group / place))):
        check_trusted(file)
    return None


def test_a_folder_that_all_may_write_to_is_not_trusted_for_its_sticky_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="others may write"):
        check_trusted(tmp_path)


def test_what_is_private_others_may_not_read(own_group: Path) -> None:
    file = own_group / "above" / "folder" / "file"
    check_trusted(file, private=True)
    file.chmod(0o640)
    check_trusted(file)
    with pytest.raises(PermissionError, match=f"chmod 600 {file}"):
        check_trusted(file, private=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize("place", ["above/folder/file", "above/folder", "above", "link"])
def test_what_belongs_to_another_user_is_not_trusted(place: str, own_group: Path) -> None:
    os.lchown(own_group / place, 4321, 4321)
    with pytest.raises(PermissionError, match=f"chown 0 {own_group / place}`"):
        check_trusted(own_group / "link" / "file")


def test_a_list_of_further_users_who_may_write_is_seen(own_group: Path) -> None:
    file = own_group / "above" / "folder" / "file"
    # Version 2; then tag, rights and id: owner, user 4321, group, mask, others.
    rows = [(1, 6, -1), (2, 6, 4321), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
    entries = b"".join(struct.pack("<HHi", *row) for row in rows)
    try:
        os.setxattr(file, "system.posix_acl_access", struct.pack("<I", 2) + entries)
    except OSError as exc:
        pytest.skip(f"no lists of users here: {exc}")
    with pytest.raises(PermissionError, match=f"chmod go-w {file}"):
        check_trusted(own_group / "link" / "file")
    file.chmod(0o644)
    check_trusted(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other groups")
def test_a_group_of_others_may_not_write(own_group: Path) -> None:
    os.chown(own_group / "above" / "folder" / "file", 0, 12)
    (own_group / "above" / "folder" / "file").chmod(0o660)
    with pytest.raises(PermissionError, match="others may write"):
        check_trusted(own_group / "link" / "file")


@pytest.mark.parametrize(
    "target", [".", "..", "above", "above/..", "../{}", "/", "above/folder/.."]
)
def test_a_path_is_followed_as_the_kernel_does(target: str, own_group: Path) -> None:
    link = own_group / "again"
    link.symlink_to(target.format(own_group.name))
    for path in (link, link / ".", link / "..", own_group / "link"):
        real, found = [*follow(path)][-1]
        assert (real, found.st_ino) == (path.resolve(), path.stat().st_ino)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_in_a_user_namespace_the_machines_own_folders_are_trusted() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 1000, 1000)
        look = f"check_trusted(Path({folder!r})); print(os.stat('/').st_uid)"
        # It is the standard library's alone, and the tests' Python may be out of others' reach.
        python = ["/usr/bin/python3", "-c", f"{Path(durable.__file__).read_text()}\n{look}"]
        for way, root in (([], 0), (["unshare", "-U", "--map-current-user"], 65534)):
            user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", *way]
            done = subprocess.run([*user, *python], check=False, capture_output=True, text=True)
            assert (done.stdout, done.stderr) == (f"{root}\n", "")


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        check_trusted(tmp_path / "a")
