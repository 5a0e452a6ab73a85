"""A chat has one version of each skill, whole, until it is given another."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.models import Contents, FrontMatter, Skill, SkillFile
from mcp_sandbox.skills.pins import MAX_PINNED_BYTES, Pins, drift, name_in_view
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.view import Showing

CHAT = ChatId("ann", "c1")
ME = (os.geteuid(), os.getegid())


def skill(name: str = "pdf", root: str = "assistant", shadowed_by: str | None = None) -> Skill:
    uri = f"skill://{root}/{name}/SKILL.md"
    return Skill(uri, root, Path("/"), FrontMatter(name, "d", {}), shadowed_by=shadowed_by)


class Place:
    """The pins of a chat, and versions to pin."""

    def __init__(self, data: Path, showing: Showing) -> None:
        self.data = data
        self.workspaces = Workspaces(data, owner=ME, skills=showing)
        self.snapshots = Snapshots(data, kept_s=0)

    def pins(self, chat: ChatId = CHAT) -> Pins:
        anyio.run(self.workspaces.open, chat)
        view = self.workspaces.view_of(chat)
        assert view
        self.view = view
        return Pins("tester", view, self.snapshots)

    def version(self, text: str) -> Contents:
        source = self.data.parent / "source"
        (source / "scripts").mkdir(parents=True, exist_ok=True)
        files = {"SKILL.md": text.encode(), "scripts/run.sh": b"#!/bin/sh\n" + text.encode()}
        for path, data in files.items():
            (source / path).write_bytes(data)
        contents = gather(source).contents
        self.snapshots.add("tester", contents.digest, files)
        return contents


@pytest.fixture(params=["mounted", "copied"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path / "data", request.param)


def test_a_version_is_there_whole_and_stays_until_another_is_pinned(place: Place) -> None:
    pins = place.pins()
    assert pins.all() == {}
    assert pins.last() is None
    one, two = place.version("one"), place.version("two")
    pin = pins.pin(skill(), one)
    pins.note_last(pin)
    folder = pins.folder(pin)
    assert (folder / "SKILL.md").read_text() == "one"
    assert pins.last() == f"{place.view.shown}/pdf"
    again = place.pins()
    assert again.all() == {skill().uri: pin}
    found = again.contents(pin)
    assert found
    assert found.digest == one.digest
    # Who works in the old version can go on.
    old = os.open(folder, os.O_RDONLY)
    new = again.pin(skill(), two)
    assert again.all() == {skill().uri: new}
    assert (folder / "SKILL.md").read_text() == "two"
    script = os.open("scripts/run.sh", os.O_RDONLY, dir_fd=old)
    assert os.read(script, 100) == b"#!/bin/sh\none"
    os.close(script)
    os.close(old)
    contents = again.contents(new)
    assert contents
    assert drift(found, contents) == ("SKILL.md", "scripts/run.sh")


def test_only_the_last_replaced_versions_are_kept(place: Place) -> None:
    pins = place.pins()
    for number in range(8):
        pins.pin(skill(), place.version(str(number)))
    tree = place.view.tree
    assert len(list(tree.glob("new-*"))) == 3
    assert len(list((tree / "pins").iterdir())) == 4
    assert {path.name for path in tree.iterdir() if not path.name.startswith("new-")} <= {
        "view",
        "pins",
        "last",
    }
    assert len(list((place.data / "sandbox/snapshots/tester").iterdir())) == 4
    assert len(list(place.snapshots.sweep())) == (4 if place.view.copied else 0)


def test_two_chats_have_each_their_own_version(place: Place) -> None:
    one, two = place.version("one"), place.version("two")
    mine, theirs = place.pins(), place.pins(ChatId("bob", "c1"))
    first, second = mine.pin(skill(), one), theirs.pin(skill(), two)
    assert (mine.folder(first) / "SKILL.md").read_text() == "one"
    assert (theirs.folder(second) / "SKILL.md").read_text() == "two"
    anyio.run(place.workspaces.remove, ChatId("bob", "c1"))
    anyio.run(partial(place.workspaces.empty_trash, is_due=lambda _: True))
    assert mine.contents(first)
    assert place.snapshots.has("tester", two.digest)
    (file,) = (place.data / "sandbox/snapshots/tester").glob(
        f"{two.digest.replace(':', '-')}/SKILL.md"
    )
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("two", 0o444)


def test_a_version_that_is_not_as_it_was_is_none(place: Place) -> None:
    pins = place.pins()
    pin = pins.pin(skill(), place.version("one"))
    folder = pins.folder(pin)
    folder.chmod(0o755)
    (folder / "more").write_text("x")
    assert pins.contents(pin) is None
    (folder / "scripts").chmod(0o755)
    shutil.rmtree(folder)
    assert pins.all() == {}
    assert pins.contents(pin) is None
    assert pins.contents(pins.pin(skill(), place.version("one"))) is not None


def test_a_chat_has_only_so_much_of_skills(place: Place) -> None:
    pins = place.pins()
    half = MAX_PINNED_BYTES // 2
    one = place.version("one")
    large = Contents((SkillFile("SKILL.md", half, "", "", "text"),), one.digest)
    pins.pin(skill("a"), large)
    pins.pin(skill("b"), large)
    pins.pin(skill("a"), large)
    with pytest.raises(TooLarge, match="over 256 MiB of skills"):
        pins.pin(skill("c"), one)
    assert set(pins.all()) == {skill("a").uri, skill("b").uri}


def test_skills_of_one_name_do_not_take_each_others_place(place: Place) -> None:
    pins = place.pins()
    mine = skill()
    theirs = skill(root="shipped", shadowed_by=mine.uri)
    one, two = place.version("one"), place.version("two")
    first, second = pins.pin(mine, one), pins.pin(theirs, two)
    assert first.name == "pdf"
    assert second.name.startswith("pdf@")
    assert set(pins.all()) == {mine.uri, theirs.uri}
    # What a chat has, it has under the same name, whoever comes before it by now.
    assert pins.pin(replace(mine, shadowed_by="another"), two).name == "pdf"


def test_no_name_leads_elsewhere_or_is_hidden(place: Place) -> None:
    pins = place.pins()
    version = place.version("one")
    names = ("..", ".", ".git", "a/b", "a\0b", "a\nb", "ü", "a b", "x" * 64, "%2E", "ä" * 300, "@")
    found = {pins.pin(skill(name), version).name for name in names}
    assert len(found) == len(names)
    folder = place.view.folder
    assert {path.name for path in folder.iterdir()} - {".gitignore"} == found
    assert all("/" not in name and not name.startswith(".") for name in found)
    assert name_in_view(skill("ü")) == "ü"


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.skills.test_pins import Place, skill
count = 0
def step(event, args):
    global count
    if event in ("open", "os.mkdir", "os.chmod", "os.rename", "os.link", "ctypes.call_function"):
        count += 1
        if count == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
place = Place(Path(sys.argv[1]), "mounted")
pins = place.pins()
contents = place.version(sys.argv[2])
sys.addaudithook(step)
pins.pin(skill(), contents)
sys.exit(3)
"""


def test_killed_at_any_step_the_sandbox_sees_one_whole_version(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", "mounted")
    pins = place.pins()
    texts = ("one", "two")
    versions = [place.version(text).digest for text in texts]
    pin = pins.pin(skill(), place.version("one"))
    for step in range(1, 200):
        command = [sys.executable, "-c", _KILLED, str(place.data), texts[step % 2], str(step)]
        done = subprocess.run(command, check=False)
        seen = gather(pins.folder(pin), anchor=place.view.anchor).contents.digest
        assert seen in versions
        known = pins.all()[skill().uri]
        assert known.digest == seen
        if done.returncode == 3:
            assert step > 10
            assert seen == versions[step % 2]
            break
        assert done.returncode == -signal.SIGKILL
    for text in texts:
        assert pins.contents(pins.pin(skill(), place.version(text)))
    assert len(list(place.view.tree.glob("new-*"))) <= 3


def test_the_chats_own_files_are_not_followed_or_replaced(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", "copied")
    pins = place.pins()
    outside = tmp_path / "outside"
    outside.mkdir()
    (place.view.workspace / ".claude").symlink_to(outside)
    (place.view.workspace / ".agents").symlink_to(outside)
    pins.pin(skill(), place.version("one"))
    assert list(outside.iterdir()) == []
    assert (place.view.workspace / ".claude/skills/pdf/SKILL.md").read_text() == "one"
    (place.view.folder / "doc").write_text("mine")
    pins.pin(skill("doc"), place.version("one"))
    assert [path.read_text() for path in place.view.tree.glob("new-*")] == ["mine"]
