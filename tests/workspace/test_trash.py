"""Emptying the trash deletes anything, follows nothing, and may be stopped anywhere."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace import directory as trash
from tests.workspace.test_usage import as_nobody, make_deep

CHAT = ChatId("ann", "c1")
NOON = 1_700_000_000.0
DAY = 24 * 3600.0


@pytest.fixture
def bin_(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "trash").mkdir()
    directory = os.open(tmp_path / "trash", os.O_RDONLY)
    yield directory
    os.close(directory)


def discard(tmp_path: Path, bin_: int, now: float = NOON) -> str:
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        return trash.throw_away(bin_, {"workspace": (parent, b"tree")}, CHAT, now)
    finally:
        os.close(parent)


def empty(bin_: int, now: float = NOON + DAY) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return trash.empty(bin_, is_due=due_at(now), checkpoint=lambda: None)


def due_at(now: float) -> Callable[[str], bool]:
    return lambda name: (trash.discarded_at(name) or now) <= now - DAY


def test_a_name_carries_its_time() -> None:
    name = trash.item_name(NOON + 0.7)
    assert name.startswith("20231114T221320Z-")
    assert trash.discarded_at(name) == NOON
    assert name != trash.item_name(NOON + 0.7)
    assert trash.item_name(NOON + 0.6999) < name < trash.item_name(NOON + 0.7001)


@pytest.mark.parametrize(
    "name", ["", "lost+found", "20231114T221320Z", "20231314T221320Z-" + "0" * 16, ".."]
)
def test_what_is_not_ours_has_no_time(name: str) -> None:
    assert trash.discarded_at(name) is None


def test_an_item_says_whose_it_was_and_keeps_the_files(tmp_path: Path, bin_: int) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("precious")
    item = tmp_path / "trash" / discard(tmp_path, bin_)
    assert (item / "chat").read_text() == "ann/c1\n"
    assert (item / "workspace" / "file").read_text() == "precious"
    assert not (tmp_path / "tree").exists()


def test_young_and_foreign_things_are_kept(tmp_path: Path, bin_: int) -> None:
    (tmp_path / "tree").mkdir()
    old = discard(tmp_path, bin_)
    (tmp_path / "tree").mkdir()
    young = discard(tmp_path, bin_, NOON + 10)
    (tmp_path / "trash" / "foreign").mkdir()
    (tmp_path / "trash" / "0-link").symlink_to(tmp_path)
    assert empty(bin_) == ((old,), ())
    assert set(os.listdir(tmp_path / "trash")) == {young, "foreign", "0-link"}


@pytest.mark.slow
def test_hostile_trees_go_and_nothing_outside_is_touched(tmp_path: Path, bin_: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("keep me")
    tree = tmp_path / "tree"
    make_tree(tree, outside)
    make_deep(tree / "wide", 5_000)
    descriptors = len(os.listdir("/proc/self/fd"))
    name = discard(tmp_path, bin_)
    assert empty(bin_) == ((name,), ())
    assert os.listdir(tmp_path / "trash") == []
    assert (outside / "file").read_text() == "keep me"
    assert (outside / "file").stat().st_nlink == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def make_tree(tree: Path, outside: Path) -> None:
    (tree / "wide").mkdir(parents=True)
    for index in range(300):
        (tree / "wide" / str(index) / "x" / "y").mkdir(parents=True)
    (tree / "directory").symlink_to(outside)
    (tree / "wide" / "up").symlink_to("../../..")
    os.link(outside / "file", tree / "hard")
    os.mkfifo(tree / "fifo")
    os.mkdir(os.fsencode(tree) + b"/\xff\n\x1b")
    (tree / ("n" * 255)).mkdir()


def test_a_stopped_emptying_goes_on_the_next_time(tmp_path: Path, bin_: int) -> None:
    class Stop(Exception):
        pass

    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    make_tree(tmp_path / "tree", tmp_path / "outside")
    name = discard(tmp_path, bin_)
    stops = 0
    while True:
        allowed = [None] * 7

        def stop(left: list[None] = allowed) -> None:
            if not left:
                raise Stop
            left.pop()

        try:
            gone, _ = trash.empty(bin_, is_due=due_at(NOON + DAY), checkpoint=stop)
        except Stop:
            stops += 1
            assert os.listdir(tmp_path / "trash") == [name]
            continue
        break
    assert stops > 5
    assert gone == (name,)


KILLED = """
import os, sys
from mcp_sandbox.workspace import directory as trash
bin_ = os.open(sys.argv[1], os.O_RDONLY)
left = int(sys.argv[2])
def checkpoint():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
def is_due(name):
    return trash.discarded_at(name) <= float(sys.argv[3])
trash.empty(bin_, is_due=is_due, checkpoint=checkpoint)
"""


def test_a_killed_emptying_loses_nothing_but_what_it_was_to_delete(
    tmp_path: Path, bin_: int
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("keep me")
    make_tree(tmp_path / "tree", tmp_path / "outside")
    discard(tmp_path, bin_)
    (tmp_path / "tree").mkdir()
    young = discard(tmp_path, bin_, NOON + 10 * DAY)
    for point in (1, 3, 50):
        command = [
            sys.executable,
            "-c",
            KILLED,
            str(tmp_path / "trash"),
            str(point),
            str(NOON + DAY),
        ]
        assert subprocess.run(command, check=False).returncode == -9
    empty(bin_)
    assert os.listdir(tmp_path / "trash") == [young]
    assert (tmp_path / "outside" / "file").read_text() == "keep me"


def test_two_processes_may_empty_the_same_trash(tmp_path: Path, bin_: int) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    make_tree(tmp_path / "tree", tmp_path / "outside")
    discard(tmp_path, bin_)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "trash"), "-1", str(NOON + DAY)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(20) for process in both] == [0, 0]
    empty(bin_)
    assert os.listdir(tmp_path / "trash") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_mount_in_a_discarded_tree_is_not_entered(tmp_path: Path, bin_: int) -> None:
    (tmp_path / "tree" / "sub" / "mount").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("keep me")
    name = discard(tmp_path, bin_)
    point = tmp_path / "trash" / name / "workspace" / "sub" / "mount"
    try:
        subprocess.run(["mount", "--bind", tmp_path / "outside", point], check=True)
        _, stuck = empty(bin_)
    finally:
        mounted = [
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        ours = [path for path in mounted if path.startswith(str(tmp_path))]
        for path in ours:
            subprocess.run(["umount", path], check=True)
    assert stuck == (name,)
    assert (tmp_path / "outside" / "file").read_text() == "keep me"
    assert len(ours) == 1
    assert empty(bin_) == ((name,), ())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_closed_directories_go_without_root(tmp_path: Path, bin_: int) -> None:
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    closed = tmp_path.joinpath("tree", *["a"] * 100)
    closed.mkdir(parents=True)
    (closed / "file").touch()
    discard(tmp_path, bin_)
    subprocess.run(["chown", "-R", "65534:65534", tmp_path / "trash"], check=True)
    (found,) = (tmp_path / "trash").glob("*/workspace/a")
    for folder in (*reversed([*found.rglob("a")]), found, found.parent):
        folder.chmod(0)

    def check() -> None:
        assert len(empty(bin_)[0]) == 1

    assert as_nobody(check) == 0
    assert os.listdir(tmp_path / "trash") == []
