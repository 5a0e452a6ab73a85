"""Skills are installed, replaced and taken away whole, and the lock file always says which."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcp_sandbox.errors import AlreadyExists, ConfigError, InvalidArgument, UnknownSkill
from mcp_sandbox.skills.supply.installed import LOCK_FILE, InstalledSkills
from mcp_sandbox.skills.supply.tree import Tree, read_folder
from tests.skills.supply import killed
from tests.skills.supply.killed import NAME, USER, put, version


@pytest.fixture
def installed(data_root: Path) -> InstalledSkills:
    return InstalledSkills(data_root, USER)


def test_installed_skill_is_there_with_its_entry(installed: InstalledSkills) -> None:
    put(installed, 1)
    assert installed.state(NAME).tree == version(1)
    entry = installed.entries()[NAME]
    assert entry.source == "./1"
    assert set(entry.files) == set(version(1))
    assert [state.differs for state in installed.states()] == [False]
    assert oct((installed.folder / NAME / "scripts" / "1.sh").stat().st_mode)[-3:] == "755"


def test_removed_skill_leaves_nothing(installed: InstalledSkills, data_root: Path) -> None:
    put(installed, 1)
    put(installed, 2)
    installed.remove(NAME)
    assert installed.entries() == {}
    files = [path for path in (data_root / "skills").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {".lock", "skills-lock.json"}
    with pytest.raises(UnknownSkill, match="there are: none"):
        installed.remove(NAME)


def test_what_was_changed_meanwhile_is_not_overwritten(installed: InstalledSkills) -> None:
    put(installed, 1)
    seen = installed.state(NAME).tree
    (installed.folder / NAME / "mine.txt").write_text("work")
    with pytest.raises(AlreadyExists, match="changed by another process"):
        installed.put(NAME, version(2), "x", instead_of=seen)
    with pytest.raises(AlreadyExists):
        installed.put(NAME, version(2), "x", instead_of=None)
    assert (installed.folder / NAME / "mine.txt").read_text() == "work"


def test_of_two_who_install_the_same_at_once_one_is_told(data_root: Path) -> None:
    with ThreadPoolExecutor(8) as several:
        waiting = [
            several.submit(
                InstalledSkills(data_root, USER).put,
                NAME,
                version(number),
                f"./{number}",
                instead_of=None,
            )
            for number in range(8)
        ]
        failures = [each.exception(timeout=30) for each in waiting]
    assert [type(failure) for failure in failures if failure] == [AlreadyExists] * 7
    winner = failures.index(None)
    assert InstalledSkills(data_root, USER).state(NAME).tree == version(winner)
    assert InstalledSkills(data_root, USER).entries()[NAME].source == f"./{winner}"


def test_local_changes_are_told_and_replaced_whole(installed: InstalledSkills) -> None:
    put(installed, 1)
    (installed.folder / NAME / "mine.txt").write_text("work")
    (installed.folder / NAME / "SKILL.md").write_text("changed")
    (installed.folder / NAME / "scripts" / "1.sh").unlink()
    (state,) = installed.states()
    assert (state.changed, state.added) == (("SKILL.md",), ("mine.txt",))
    assert state.missing == ("scripts/1.sh",)
    put(installed, 2)
    assert read_folder(installed.folder / NAME) == version(2)
    assert not any(state.differs for state in installed.states())


def test_lock_takes_what_is_there_as_it_is(installed: InstalledSkills) -> None:
    put(installed, 1)
    (installed.folder / "own").mkdir()
    (installed.folder / "own" / "SKILL.md").write_text("x")
    (installed.folder / NAME / "SKILL.md").write_text("changed")
    assert installed.relock() == ["own", NAME]
    assert installed.entries()[NAME].source == "./1"
    assert installed.entries()["own"].source == ""
    assert installed.relock() == []


def test_folder_that_is_gone_and_one_with_a_link_are_told(installed: InstalledSkills) -> None:
    put(installed, 1)
    (installed.folder / NAME).rename(installed.folder / "moved")
    (installed.folder / "moved" / "link").symlink_to("/etc/passwd")
    moved, gone = installed.states()
    assert "link or a special file" in moved.problem
    assert gone.problem == "its folder is gone"


def test_damaged_lock_file_is_reported_and_left_alone(installed: InstalledSkills) -> None:
    put(installed, 1)
    (installed.folder / LOCK_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"skills-lock\.json is damaged"):
        installed.put(NAME, version(2), "x", instead_of=version(1))
    assert read_folder(installed.folder / NAME) == version(1)


def test_rest_of_a_change_is_dropped(installed: InstalledSkills, data_root: Path) -> None:
    put(installed, 1)
    stage = data_root / "skills" / ".staged"
    (stage / "skill").mkdir(parents=True)
    assert not installed.state(NAME).differs
    assert not stage.exists()
    stage.write_text("no folder")
    put(installed, 2)
    assert installed.state(NAME).tree == version(2)


def test_lock_file_of_the_version_before_is_read(installed: InstalledSkills) -> None:
    put(installed, 1)
    lock = installed.folder / LOCK_FILE
    content = json.loads(lock.read_bytes())
    content["skills"][NAME]["former"] = content["skills"][NAME] | {"source": "./0"}
    lock.write_text(json.dumps(content))
    assert [state.differs for state in installed.states()] == [False]
    put(installed, 2)
    assert "former" not in json.loads(lock.read_bytes())["skills"][NAME]


def test_user_is_never_a_path(data_root: Path) -> None:
    with pytest.raises(InvalidArgument):
        InstalledSkills(data_root, "../other")


def die(data_root: Path, at: int, what: str) -> bool:
    """Begin a change in another process and kill it; False: it was through before."""
    child = os.fork()
    if child == 0:
        try:
            killed.change_and_die(InstalledSkills(data_root, USER), what, at)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "before", "after"),
    [
        ("1", None, version(1)),
        ("3", version(2), version(3)),
        ("remove", version(2), None),
    ],
)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.whole)])
def test_killed_at_any_point_a_change_is_whole_or_not_at_all(
    what: str, before: Tree | None, after: Tree | None, every: int, tmp_path: Path
) -> None:
    prepared = InstalledSkills(tmp_path / "prepared", USER)
    prepared.states()
    if before is not None:
        put(prepared, 2)
    for at in range(0, 1000, every):
        root = tmp_path / "again"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "prepared", root)
        dead = die(root, at, what)
        installed = InstalledSkills(root, USER)
        place = installed.folder / NAME
        seen = read_folder(place) if place.exists() else None
        assert seen == after or (dead and seen == before), at
        assert dead or [state.differs for state in installed.states()] == [False] * bool(after), at
        # Given again, it ends as if nothing had been.
        if dead and (what != "remove" or installed.states()):
            killed.change(installed, what)
        assert [state.differs for state in installed.states()] == [False] * bool(after), at
        assert not (root / "skills" / ".staged").exists(), at
        if not dead:
            return
    pytest.fail("the change never came to its end")
