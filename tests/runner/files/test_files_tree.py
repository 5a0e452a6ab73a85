import os
import random
import socket
import string
import threading
import time
from pathlib import Path

import pytest

from mcp_sandbox.runner.files import kept
from mcp_sandbox.runner.files.paths import KEPT
from mcp_sandbox.runner.wire.protocol import OpError
from tests.runner.files.bench import call, leftovers, make_deep, refused, rows, small_disk


def names(**args: object) -> list[str]:
    return [row[0] for row in rows("list", **args)]


def test_a_listing_tells_kind_size_time_and_target(workspace: Path) -> None:
    (workspace / "f").write_text("four")
    os.utime(workspace / "f", (1, 1.5))
    (workspace / "d").mkdir()
    (workspace / "l").symlink_to("/etc/passwd")
    os.mkfifo(workspace / "p")
    found = {row[0]: row for row in rows("list")}
    assert list(found) == ["d", "f", "l", "p"]
    assert found["f"] == ["f", "file", 4, 1.5, None]
    assert found["l"][1:] == ["link", 11, found["l"][3], "/etc/passwd"]
    assert (found["d"][1], found["p"][1]) == ("directory", "fifo")


def test_depth_and_hidden_choose_what_is_listed(workspace: Path) -> None:
    (workspace / "a/b/c").mkdir(parents=True)
    (workspace / ".hidden").mkdir()
    (workspace / ".hidden/f").touch()
    assert names() == [".hidden", "a"]
    assert names(depth=2) == [".hidden", ".hidden/f", "a", "a/b"]
    assert names(depth=9, hidden=False) == ["a", "a/b", "a/b/c"]
    assert names(path="a", depth=3) == ["a/b", "a/b/c"]
    assert names(path="~/..") == [f"{workspace.parent}/home", "."]


def test_a_limit_says_that_it_cut(workspace: Path) -> None:
    for n in range(20):
        (workspace / f"{n:02}").touch()
    result, _ = call("list", limit=5)
    assert result == {"path": ".", "total": 20, "truncated": True}
    assert names(limit=5) == ["00", "01", "02", "03", "04"]


@pytest.mark.slow
def test_a_hundred_thousand_entries_are_listed_and_deleted(workspace: Path) -> None:
    for folder in range(100):
        (workspace / f"many/{folder}").mkdir(parents=True)
        (workspace / f"many/{folder}/0").touch()
        for n in range(1, 1000):
            os.link(workspace / f"many/{folder}/0", workspace / f"many/{folder}/{n}")
    started = time.monotonic()
    result, _ = call("list", path="many", depth=2)
    assert result["total"] == 100_100
    assert call("glob", pattern="999")[0]["total"] == 100
    assert call("delete", path="many", recursive=True)[0]["entries"] == 100_101
    assert time.monotonic() - started < 20


@pytest.mark.slow
def test_four_thousand_levels_are_searched_moved_and_deleted(workspace: Path) -> None:
    (workspace / "top").mkdir()
    make_deep(workspace / "top", 4200)
    assert call("list", path="top", depth=10)[0]["total"] == 10
    assert call("list", path="top", depth=10_000)[0]["total"] == 4201
    assert call("glob", pattern="bottom.txt")[0]["total"] == 1
    assert call("grep", pattern="x")[0]["matches"] == 0
    call("move", source="top", destination="moved")
    assert call("delete", path="moved", recursive=True)[0]["entries"] == 4202
    assert list(workspace.iterdir()) == []


def test_names_that_are_not_text_are_listed_and_deleted(workspace: Path) -> None:
    folder = os.fsencode(workspace / "odd")
    os.mkdir(folder)
    for odd in (b"\xff\xfe", b"a\nb", b"-rf", b" ", b"\x1b[2J", b"*", b"\\x41"):
        os.close(os.open(folder + b"/" + odd, os.O_CREAT, 0o644))
    assert sorted(names(path="odd")) == sorted(
        f"odd/{n}" for n in (r"\xff\xfe", r"a\x0ab", "-rf", " ", r"\x1b[2J", "*", r"\x41")
    )
    for name in names(path="odd"):
        assert call("delete", path=name)[0]["path"] == name
    assert names(path="odd") == []


def test_a_file_is_not_a_directory(workspace: Path) -> None:
    (workspace / "f").touch()
    error = refused("list", path="f")
    assert error.code == "wrong_kind"
    assert "read_file" in error.message
    assert refused("list", path="missing").code == "not_found"


def test_deleting_a_link_leaves_what_it_points_to(workspace: Path) -> None:
    outside = workspace.parent / "home"
    (outside / "kept").touch()
    (workspace / "link").symlink_to(outside)
    (workspace / "tree").mkdir()
    (workspace / "tree/link").symlink_to(outside)
    (workspace / "tree/loop").symlink_to("../tree")
    assert call("delete", path="link")[0] == {"path": "link", "kind": "link", "entries": 1}
    assert call("delete", path="tree", recursive=True)[0]["entries"] == 3
    assert (outside / "kept").exists()


@pytest.mark.parametrize("target", ["/nowhere/file", "../gone/file", "file/below", "link"])
def test_a_link_to_nothing_is_deleted_and_moved(workspace: Path, target: str) -> None:
    (workspace / "file").touch()
    (workspace / "link").symlink_to(target)
    assert call("move", source="link", destination="moved")[0]["destination"] == "moved"
    assert call("delete", path="moved")[0] == {"path": "moved", "kind": "link", "entries": 1}


def test_a_directory_with_content_needs_recursive(workspace: Path) -> None:
    (workspace / "d/e").mkdir(parents=True)
    error = refused("delete", path="d")
    assert error.code == "wrong_kind"
    assert "recursive=true" in error.message
    assert call("delete", path="d/e")[0] == {"path": "d/e", "kind": "directory", "entries": 1}


@pytest.mark.parametrize("path", [".", "~", "/", "..", "~/..", "./", "link/.."])
def test_the_workspace_and_what_holds_it_cannot_be_deleted_or_moved(
    workspace: Path, path: str
) -> None:
    (workspace / "d").mkdir()
    (workspace / "link").symlink_to("d")
    (workspace / "up").symlink_to("../..")
    (workspace / "f").touch()
    holder = f"up/{workspace.parent.name}"
    assert refused("delete", path=holder, recursive=True).code == "invalid"
    assert refused("delete", path=path, recursive=True).code == "invalid"
    assert refused("move", source=path, destination="x").code == "invalid"
    assert refused("move", source="f", destination=path, overwrite=True).code == "invalid"
    assert (workspace / "f").exists()


@pytest.mark.slow
def test_a_tree_that_others_keep_changing_is_deleted_or_said_to_be_busy(
    workspace: Path, request: pytest.FixtureRequest
) -> None:
    rounds = 20 if request.config.getoption("--whole") else 6
    outside = workspace.parent / "home"
    (outside / "kept").touch()
    stop = threading.Event()

    def disturb() -> None:
        choose = random.Random(1)
        while not stop.is_set():
            target = workspace / "tree" / choose.choice(string.ascii_lowercase)
            try:
                target.mkdir(parents=choose.random() < 0.01)
                (target / "f").touch()
                target.rename(target.with_name(choose.choice(string.ascii_lowercase)))
                target.symlink_to(outside)
            except OSError:
                continue

    thread = threading.Thread(target=disturb)
    (workspace / "tree").mkdir()
    thread.start()
    try:
        for _ in range(rounds):
            (workspace / "tree").mkdir(exist_ok=True)
            delete_whatever_happens()
    finally:
        stop.set()
        thread.join()
    assert (outside / "kept").exists()


def delete_whatever_happens() -> None:
    try:
        call("delete", path="tree", recursive=True)
    except OpError as exc:
        if exc.code not in ("wrong_kind", "not_found"):
            raise


def test_a_file_gets_another_name_and_directories_on_the_way(workspace: Path) -> None:
    (workspace / "f").write_text("x")
    result, _ = call("move", source="f", destination="a/b/g")
    assert result == {"source": "f", "destination": "a/b/g", "replaced": False}
    assert (workspace / "a/b/g").read_text() == "x"


def test_an_existing_destination_is_kept_unless_asked(workspace: Path) -> None:
    (workspace / "f").write_text("new")
    (workspace / "g").write_text("old")
    (workspace / "d").mkdir()
    error = refused("move", source="f", destination="g")
    assert error.code == "exists"
    assert "overwrite=true" in error.message
    assert "d/name" in refused("move", source="f", destination="d").message
    assert (workspace / "g").read_text() == "old"
    assert call("move", source="f", destination="g", overwrite=True)[0]["replaced"] is True
    assert (workspace / "g").read_text() == "new"


def test_moves_that_make_no_sense_are_refused(workspace: Path) -> None:
    (workspace / "d/e").mkdir(parents=True)
    (workspace / "full/x").mkdir(parents=True)
    (workspace / "f").touch()
    assert refused("move", source="d", destination="d/e/g").code == "invalid"
    assert refused("move", source="f", destination="./f").code == "invalid"
    assert refused("move", source="missing", destination="g").code == "not_found"
    assert refused("move", source="f", destination="d", overwrite=True).code == "wrong_kind"
    assert refused("move", source="d", destination="full", overwrite=True).code == "exists"


def test_a_move_onto_a_hard_link_of_itself_leaves_one_name(workspace: Path) -> None:
    (workspace / "f").write_text("x")
    os.link(workspace / "f", workspace / "g")
    call("move", source="f", destination="g", overwrite=True)
    assert names() == ["g"]


def test_a_moved_link_stays_a_link(workspace: Path) -> None:
    (workspace / "link").symlink_to("nowhere")
    call("move", source="link", destination="d/link")
    assert os.readlink(workspace / "d/link") == "nowhere"


def test_a_move_to_another_disk_keeps_mode_time_links_and_holes(workspace: Path) -> None:
    with small_disk(workspace / "disk", "256k"):
        tree = workspace / "tree"
        (tree / "sub").mkdir(parents=True)
        (tree / "sub/run").write_text("x")
        (tree / "sub/run").chmod(0o751)
        (tree / "sparse").touch()
        os.truncate(tree / "sparse", 10 * 2**30)
        (tree / "link").symlink_to("sub/run")
        os.mkfifo(tree / "fifo")
        os.utime(tree / "sub/run", (5, 5))
        (tree / "sub").chmod(0o555)
        os.utime(tree / "sub", (7, 7))
        call("move", source="tree", destination="disk/tree")
        assert not tree.exists()
        moved = workspace / "disk/tree"
        assert (moved / "sub/run").stat().st_mode & 0o777 == 0o751
        assert ((moved / "sub/run").stat().st_mtime, (moved / "sub").stat().st_mtime) == (5, 7)
        assert (moved / "sub").stat().st_mode & 0o777 == 0o555
        assert os.readlink(moved / "link") == "sub/run"
        assert (moved / "sparse").stat().st_size == 10 * 2**30
        call("move", source="disk/tree/sub/run", destination="run")
        assert (workspace / "run").stat().st_mtime == 5


def test_a_move_to_a_full_disk_keeps_the_source_and_leaves_nothing(workspace: Path) -> None:
    with small_disk(workspace / "disk") as disk:
        (workspace / "tree").mkdir()
        (workspace / "tree/big").write_bytes(bytes(range(256)) * 1000)
        assert refused("move", source="tree", destination="disk/tree").code == "no_space"
        assert (workspace / "tree/big").stat().st_size == 256_000
        assert leftovers(disk) == []
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(workspace / "sock"))
            assert refused("move", source="sock", destination="disk/s").code == "unsupported"


def test_of_two_racing_moves_to_one_name_one_wins(workspace: Path) -> None:
    for attempt in range(50):
        for name in ("a", "b"):
            (workspace / name).write_text(name)
        target = f"to-{attempt}"
        race = threading.Thread(target=lambda t=target: try_to_link(workspace / "a", workspace / t))
        race.start()
        won = try_to_move("b", target)
        race.join()
        assert (workspace / target).read_text() == ("b" if won else "a")
        assert (workspace / "b").exists() is not won


def try_to_link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return


def try_to_move(source: str, target: str) -> bool:
    try:
        call("move", source=source, destination=target)
    except OpError as exc:
        if exc.code != "exists":
            raise
        return False
    return True


def test_what_is_taken_over_of_an_earlier_version_is_bounded_and_links_stop_nothing(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TOTAL", 100_000)
    old, new = (folder / KEPT for folder in (workspace, workspace.parent / "home"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    for number in range(1500):
        (old / f"{number:x}-0a1b2c.txt").touch()
        os.truncate(old / f"{number:x}-0a1b2c.txt", 1000)
    kept.take_over()
    assert sum(path.stat().st_size for path in new.iterdir()) <= 100_000
    for path in (*old.iterdir(), *new.iterdir()):
        path.unlink()
    (old / "1-0a1b2c.txt").symlink_to("/etc/passwd")
    (old / "2-0a1b2c.txt").mkdir()
    os.mkfifo(old / "3-0a1b2c.txt")
    (old / "4-0a1b2c.txt").write_text("whole")
    (new / "4-0a1b2c.txt").write_text("who")
    kept.take_over()
    assert [(path.name, path.read_text()) for path in new.iterdir()] == [("4-0a1b2c.txt", "whole")]
    assert len([*old.iterdir()]) == 3
