"""Copies of skills that never change: made whole or not at all, and kept while a chat has one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.snapshots import Snapshots

USER = "ann"
FILES = {
    "SKILL.md": b"---\nname: pdf\ndescription: d\n---\nRead it.\n",
    "scripts/run.py": b"#!/usr/bin/env python3\nprint(1)\n",
    "references/deep/er.md": b"text\n",
}


def as_source(folder: Path) -> str:
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return gather(folder).contents.digest


@pytest.fixture
def digest(tmp_path: Path) -> str:
    return as_source(tmp_path / "source")


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "data", kept_s=0)


def store(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / f"data/sandbox/snapshots/{USER}").iterdir())


def clone(snapshots: Snapshots, digest: str, target: Path, *, link: bool = True) -> Path:
    target.mkdir()
    snapshots.clone(USER, digest, target, link=link)
    return target


def test_a_copy_has_the_same_bytes_and_cannot_be_changed(
    snapshots: Snapshots, digest: str, tmp_path: Path
) -> None:
    assert not snapshots.has(USER, digest)
    snapshots.add(USER, digest, FILES)
    assert snapshots.has(USER, digest)
    assert Snapshots(tmp_path / "data").has(USER, digest)
    (name,) = store(tmp_path)
    assert name == digest.replace(":", "-")
    for link in (True, False):
        copy = clone(snapshots, digest, tmp_path / f"copy-{link}", link=link)
        assert gather(copy).contents.digest == digest
        assert (copy / "SKILL.md").stat().st_mode & 0o777 == 0o444
        assert (copy / "scripts/run.py").stat().st_mode & 0o777 == 0o555
        assert (copy / "references/deep").stat().st_mode & 0o777 == 0o555
        assert (copy / "SKILL.md").stat().st_nlink == (2 if link else 1)


def test_a_damaged_copy_is_thrown_away(snapshots: Snapshots, digest: str, tmp_path: Path) -> None:
    snapshots.add(USER, digest, FILES)
    (name,) = store(tmp_path)
    damaged = tmp_path / f"data/sandbox/snapshots/{USER}" / name / "SKILL.md"
    damaged.chmod(0o644)
    damaged.write_bytes(b"")
    fresh = Snapshots(tmp_path / "data")
    assert not fresh.has(USER, digest)
    assert store(tmp_path) == []
    fresh.add(USER, digest, FILES)
    assert fresh.has(USER, digest)


def test_a_copy_that_is_there_already_stays(
    snapshots: Snapshots, digest: str, tmp_path: Path
) -> None:
    snapshots.add(USER, digest, FILES)
    (name,) = store(tmp_path)
    before = (tmp_path / f"data/sandbox/snapshots/{USER}" / name).stat().st_ino
    Snapshots(tmp_path / "data").add(USER, digest, FILES)
    assert store(tmp_path) == [name]
    assert (tmp_path / f"data/sandbox/snapshots/{USER}" / name).stat().st_ino == before


def test_copies_that_nobody_has_are_swept(
    snapshots: Snapshots, digest: str, tmp_path: Path
) -> None:
    snapshots.add(USER, digest, FILES)
    held = clone(snapshots, digest, tmp_path / "data" / "held")
    assert list(snapshots.sweep()) == []
    for path in (held, *held.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(held)
    assert list(Snapshots(tmp_path / "data").sweep()) == []
    ((swept, size),) = snapshots.sweep(dry_run=True)
    assert (swept, size > 0) == (f"{USER}/{digest.replace(':', '-')}", True)
    assert snapshots.has(USER, digest)
    assert [each for each, _ in snapshots.sweep()] == [swept]
    assert store(tmp_path) == []
    assert not snapshots.has(USER, digest)
    with pytest.raises(FileNotFoundError):
        clone(snapshots, digest, tmp_path / "late")


def test_users_have_copies_of_their_own(snapshots: Snapshots, digest: str, tmp_path: Path) -> None:
    for user in ("ann", "bob"):
        assert not snapshots.has(user, digest)
        snapshots.add(user, digest, FILES)
        (tmp_path / user).mkdir()
        snapshots.clone(user, digest, tmp_path / user, link=True)
    assert not (tmp_path / "ann/SKILL.md").samefile(tmp_path / "bob/SKILL.md")
    assert os.stat(tmp_path / "ann/SKILL.md").st_nlink == 2


_KILLED = """
import os, signal, sys, threading
from pathlib import Path
from mcp_sandbox.skills.snapshots import Snapshots
from tests.skills.test_snapshots import FILES, USER
count = 0
def step(event, args):
    global count
    if event in ("open", "os.mkdir", "os.chmod", "os.rename"):
        if any(isinstance(a, (str, bytes)) and "snapshots" in os.fsdecode(a) for a in args):
            count += 1
            if count == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
snapshots = Snapshots(Path(sys.argv[1]))
sys.addaudithook(step)
snapshots.add(USER, sys.argv[2], FILES)
"""


def test_killed_at_any_step_it_leaves_a_whole_copy_or_none(digest: str, tmp_path: Path) -> None:
    for step in range(1, 100):
        data = tmp_path / f"data-{step}"
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(data), digest, str(step)], check=False
        )
        fresh = Snapshots(data, kept_s=0)
        if fresh.has(USER, digest):
            clone(fresh, digest, tmp_path / f"copy-{step}", link=False)
            assert gather(tmp_path / f"copy-{step}").contents.digest == digest
        fresh.add(USER, digest, FILES)
        assert fresh.has(USER, digest)
        assert len([each for each, _ in fresh.sweep()]) >= 1
        assert os.listdir(data / f"sandbox/snapshots/{USER}") == []
        if done.returncode == 0:
            assert step > 6
            return
        assert done.returncode == -signal.SIGKILL
    pytest.fail("it never came to its end")
