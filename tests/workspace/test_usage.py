"""What a tree occupies, however it is shaped and whatever happens to it meanwhile."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcp_sandbox.workspace.meter import TreeUsage, free_space, measure


def usage(*trees: Path, **options: object) -> TreeUsage:
    roots = [os.open(tree, os.O_RDONLY | os.O_DIRECTORY) for tree in trees]
    try:
        return measure(roots, **options)  # type: ignore[arg-type]
    finally:
        for root in roots:
            os.close(root)


def allocated(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def make_deep(tree: Path, levels: int) -> None:
    """Nest directories deeper than any path can say."""
    here = os.open(tree, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here), "wb") as stream:
        stream.write(b"x" * 8192)
    os.close(here)


def remove_deep(tree: Path) -> None:
    # shutil.rmtree recurses, and pytest would use it on what a test leaves.
    subprocess.run(["rm", "-rf", tree], check=True)


def test_blocks_count_and_not_sizes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "full").write_bytes(b"x" * 100_000)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(10 * 1024**3)
    found = usage(tmp_path)
    parts = (tmp_path, tmp_path / "sub", tmp_path / "sub" / "full", tmp_path / "sparse")
    assert found == TreeUsage(allocated(*parts), files=3)
    assert found.allocated_bytes < 1024**2


def test_a_hard_link_counts_once_over_all_trees(tmp_path: Path) -> None:
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    (workspace / "file").write_bytes(b"x" * 100_000)
    os.link(workspace / "file", workspace / "again")
    os.link(workspace / "file", home / "again")
    found = usage(workspace, home)
    assert found == TreeUsage(allocated(workspace, home, workspace / "file"), files=3)


def test_links_are_not_followed(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    tree.mkdir()
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 500_000)
    (tree / "directory").symlink_to(outside)
    (tree / "file").symlink_to(outside / "big")
    (tree / "up").symlink_to("..")
    os.mkfifo(tree / "fifo")
    found = usage(tree)
    assert found.files == 4
    assert found.allocated_bytes < 100_000


@pytest.mark.slow
def test_a_tree_of_5000_levels_is_measured_with_few_descriptors(tmp_path: Path) -> None:
    make_deep(tmp_path, 5_000)
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd"))
    try:
        found = usage(tmp_path, checkpoint=watch)
    finally:
        remove_deep(tmp_path / "d")
    assert found.complete
    assert found.files == 5_001
    assert most - before < 60
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_100_000_entries_are_measured(tmp_path: Path) -> None:
    for directory in range(100):
        (tmp_path / str(directory)).mkdir()
        inside = os.open(tmp_path / str(directory), os.O_RDONLY)
        os.mknod("0", dir_fd=inside)
        # Links are made many times faster than files.
        for name in range(1, 999):
            os.link("0", str(name), src_dir_fd=inside, dst_dir_fd=inside)
        os.close(inside)
    found = usage(tmp_path)
    remove_deep(tmp_path)
    assert found.complete
    assert found.files == 100_000


def test_names_that_are_no_text_count(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\xfe\n\x1b"
    os.mkdir(odd)
    Path(os.fsdecode(odd + b"/\xfffile")).write_bytes(b"x")
    assert usage(tmp_path).files == 2


def test_the_walk_ends_at_the_entry_budget_and_says_so(tmp_path: Path) -> None:
    for name in range(50):
        (tmp_path / str(name)).touch()
    found = usage(tmp_path, max_entries=20)
    assert (found.files, found.complete) == (20, False)


def test_a_passed_deadline_gives_what_was_counted_so_far(tmp_path: Path) -> None:
    make_deep(tmp_path, 10)
    steps = 0

    def expire() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise TimeoutError

    before = len(os.listdir("/proc/self/fd"))
    found = usage(tmp_path, checkpoint=expire)
    assert not found.complete
    assert 0 < found.files < 11
    assert len(os.listdir("/proc/self/fd")) == before


MOVER = """
import os, sys
print("ready", flush=True)
while os.getppid() == int(sys.argv[1]):
    os.rename("a/" + "d/" * 40 + "d", "b/moved")
    os.rename("b/moved", "a/" + "d/" * 40 + "d")
    open("a/new", "w").close()
    os.unlink("a/new")
"""


@contextmanager
def moving(tree: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", "-c", MOVER, str(os.getpid())]
    with subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.slow
def test_a_tree_that_moves_while_it_is_measured_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    make_deep(tmp_path / "a", 100)
    before = len(os.listdir("/proc/self/fd"))
    with moving(tmp_path):
        found = [usage(tmp_path) for _ in range(300)]
    assert all(each.files >= 40 for each in found)
    assert any(each.files >= 103 for each in found)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_moved_away_under_the_walk_is_reported_as_a_gap(tmp_path: Path) -> None:
    make_deep(tmp_path, 60)
    (tmp_path / "elsewhere").mkdir()
    deep = tmp_path.joinpath(*["d"] * 50)
    (deep / "late").mkdir()
    steps = 0

    def move() -> None:
        nonlocal steps
        steps += 1
        if not (tmp_path / "elsewhere" / "d").exists() and steps > 58:
            (deep / "d" / "d").rename(tmp_path / "elsewhere" / "d")

    assert not usage(tmp_path, checkpoint=move).complete


def as_nobody(action: Callable[[], None]) -> int:
    """Run `action` in a child that is not root; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_directory_closed_by_its_owner_hides_nothing_and_stays_closed(tmp_path: Path) -> None:
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    closed = tmp_path / "tree" / "closed"
    (closed / "in").mkdir(parents=True)
    (closed / "in" / "file").write_bytes(b"x" * 100_000)
    for path in (tmp_path / "tree", closed, closed / "in"):
        os.chown(path, 65534, 65534)
    (closed / "in").chmod(0o200)
    closed.chmod(0)

    def check() -> None:
        found = usage(tmp_path / "tree")
        assert found.complete
        assert found.allocated_bytes > 100_000

    assert as_nobody(check) == 0
    assert closed.stat().st_mode & 0o777 == 0
    assert (closed / "in").stat().st_mode & 0o777 == 0o200


def test_free_space_is_what_the_file_system_says(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        found = free_space(root)
    finally:
        os.close(root)
    assert 0 < found.free_bytes <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
