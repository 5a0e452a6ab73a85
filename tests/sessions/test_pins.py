"""A chat has one version of each skill, whole, until it is given another."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.skill_pins import MAX_PINNED_BYTES, PinStore, drift, name_in_view, path_of
from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.skill import Contents, FrontMatter, Skill, SkillFile
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import SHOWN
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("ann", "c1")
ME = (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=ME)


def skill(name: str = "pdf", root: str = "assistant", shadowed_by: str | None = None) -> Skill:
    uri = f"skill://{root}/{name}/SKILL.md"
    return Skill(uri, root, Path("/"), FrontMatter(name, "d", {}), shadowed_by=shadowed_by)


class Place:
    """The pins of a chat, and versions to pin."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.workspaces = Workspaces(data, users=USERS, skills=True)
        self.files: dict[str, dict[str, bytes]] = {}

    def pins(self, chat: ChatId = CHAT) -> PinStore:
        anyio.run(self.workspaces.open, chat)
        tree = self.workspaces.skills_of(chat)
        assert tree
        self.tree = tree
        return PinStore(tree)

    def version(self, text: str) -> Contents:
        source = self.data.parent / "source"
        (source / "scripts").mkdir(parents=True, exist_ok=True)
        files = {"SKILL.md": text.encode(), "scripts/run.sh": b"#!/bin/sh\n" + text.encode()}
        for path, data in files.items():
            (source / path).write_bytes(data)
        contents = gather(source).contents
        self.files[contents.digest] = files
        return contents

    def pin(self, pins: PinStore, which: Skill, contents: Contents) -> str:
        return pins.pin(which, contents, self.files[contents.digest])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "data")


def digest_of(pins: PinStore, which: Skill) -> str:
    found = pins.find(which.uri)
    assert found
    return found[1].digest


def test_a_version_is_there_whole_and_stays_until_another_is_pinned(place: Place) -> None:
    pins = place.pins()
    assert pins.names() == {}
    assert pins.last() is None
    one, two = place.version("one"), place.version("two")
    name = place.pin(pins, skill(), one)
    folder = pins.folder(name)
    assert (folder / "SKILL.md").read_text() == "one"
    assert pins.last() == path_of("pdf") == "/opt/skills/pdf"
    again = place.pins()
    assert again.find(skill().uri) == ("pdf", one)
    # What works in the old version can go on.
    old = os.open(folder, os.O_RDONLY)
    assert place.pin(again, skill(), two) == "pdf"
    assert again.find(skill().uri) == ("pdf", two)
    assert (folder / "SKILL.md").read_text() == "two"
    script = os.open("scripts/run.sh", os.O_RDONLY, dir_fd=old)
    assert os.read(script, 100) == b"#!/bin/sh\none"
    os.close(script)
    os.close(old)
    assert drift(one, two) == ("SKILL.md", "scripts/run.sh")


def test_the_skill_that_was_activated_last_is_remembered(place: Place) -> None:
    pins = place.pins()
    for name in ("pdf", "doc"):
        place.pin(pins, skill(name), place.version("one"))
    assert place.pins().last() == path_of("doc")
    pins.note_last(skill("pdf").uri)
    assert place.pins().last() == path_of("pdf")


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[1]", b'{"uri"', b"[" * 100_000])
def test_a_note_that_is_unreadable_makes_the_chat_get_its_skills_anew(
    place: Place, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pins = place.pins()
    one = place.version("one")
    place.pin(pins, skill(), one)
    (place.tree / "active.json").write_bytes(garbage)
    assert (pins.find(skill().uri), pins.last()) == (None, None)
    assert "active.json is unreadable" in caplog.text
    assert place.pin(pins, skill(), one) == "pdf"
    assert pins.find(skill().uri) == ("pdf", one)


def test_only_the_last_replaced_versions_are_kept(place: Place) -> None:
    pins = place.pins()
    for number in range(8):
        place.pin(pins, skill(), place.version(str(number)))
    assert len(list(place.tree.glob("new-*"))) == 3
    assert {path.name for path in place.tree.iterdir() if not path.name.startswith("new-")} == {
        SHOWN,
        "active.json",
        "lock",
    }


def test_two_chats_have_each_their_own_version(place: Place) -> None:
    one, two = place.version("one"), place.version("two")
    mine, theirs = place.pins(), place.pins(ChatId("bob", "c1"))
    first, second = place.pin(mine, skill(), one), place.pin(theirs, skill(), two)
    assert (mine.folder(first) / "SKILL.md").read_text() == "one"
    assert (theirs.folder(second) / "SKILL.md").read_text() == "two"
    anyio.run(place.workspaces.remove, ChatId("bob", "c1"))
    anyio.run(partial(place.workspaces.empty_trash, is_due=lambda _: True))
    assert digest_of(mine, skill()) == one.digest


def test_what_a_sandbox_sees_cannot_be_changed_and_is_run_by_its_first_line(place: Place) -> None:
    pins = place.pins()
    folder = pins.folder(place.pin(pins, skill(), place.version("one")))
    modes = {path: (folder / path).stat().st_mode & 0o777 for path in (".", "SKILL.md")}
    assert modes == {".": 0o555, "SKILL.md": 0o444}
    assert (folder / "scripts").stat().st_mode & 0o777 == 0o555
    assert (folder / "scripts/run.sh").stat().st_mode & 0o777 == 0o555


def test_a_version_gets_its_name_when_all_of_it_is_on_the_disk(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    unsynced: list[set[str]] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def rename(source: Path, target: Path) -> None:
        made = Path(source)
        if made.is_dir():
            unsynced.append({str(each) for each in (made, *made.rglob("*"))} - synced)
        real_rename(source, target)

    pins, one = place.pins(), place.version("one")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    place.pin(pins, skill(), one)
    assert unsynced == [set()]
    assert str(place.tree / SHOWN) in synced


def test_what_could_not_be_written_leaves_nothing(place: Place) -> None:
    pins, one = place.pins(), place.version("one")
    with pytest.raises(OSError, match="File name too long"):
        pins.pin(skill(), one, {"a": b"", "b" * 300: b""})
    assert (list(place.tree.glob("new-*")), pins.names()) == ([], {})


def test_a_version_that_is_gone_is_none_and_can_be_pinned_again(place: Place) -> None:
    pins = place.pins()
    folder = pins.folder(place.pin(pins, skill(), place.version("one")))
    folder.chmod(0o755)
    (folder / "scripts").chmod(0o755)
    shutil.rmtree(folder)
    assert (pins.find(skill().uri), pins.last()) == (None, None)
    place.pin(pins, skill(), place.version("one"))
    assert pins.find(skill().uri)


def test_a_chat_has_only_so_much_of_skills(place: Place) -> None:
    pins = place.pins()
    one = place.version("one")
    rest = MAX_PINNED_BYTES - sum(file.size for file in one.files)
    large = Contents((SkillFile("SKILL.md", rest, "", "", "text"),), one.digest)
    place.pin(pins, skill("a"), one)
    place.pin(pins, skill("b"), large)
    place.pin(pins, skill("a"), one)
    with pytest.raises(TooLarge, match="over 256 MiB of skills"):
        place.pin(pins, skill("c"), replace(large, files=(*large.files, *one.files)))
    assert set(pins.names()) == {skill("a").uri, skill("b").uri}


def test_skills_of_one_name_do_not_take_each_others_place(place: Place) -> None:
    pins = place.pins()
    mine = skill()
    theirs = skill(root="shipped", shadowed_by=mine.uri)
    one, two = place.version("one"), place.version("two")
    first, second = place.pin(pins, mine, one), place.pin(pins, theirs, two)
    assert first == "pdf"
    assert second.startswith("pdf@")
    assert pins.names() == {mine.uri: first, theirs.uri: second}
    # What a chat has, it has under the same name, whichever comes before it by now.
    assert place.pin(pins, replace(mine, shadowed_by="another"), two) == "pdf"
    assert place.pin(pins, skill(root="user"), one).startswith("pdf@")
    assert digest_of(pins, mine) == two.digest


def test_no_name_leads_elsewhere_or_is_hidden(place: Place) -> None:
    pins = place.pins()
    version = place.version("one")
    names = ("..", ".", ".git", "a/b", "a\0b", "a\nb", "ü", "a b", "x" * 64, "%2E", "ä" * 300, "@")
    found = {place.pin(pins, skill(name), version) for name in names}
    assert len(found) == len(names)
    assert {path.name for path in (place.tree / SHOWN).iterdir()} == found
    assert all("/" not in name and not name.startswith(".") for name in found)
    assert name_in_view(skill("ü")) == "ü"


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.sessions.test_pins import Place, digest_of, skill

# A kill loses nothing that was written, synced or not.
os.fsync = lambda descriptor: None
STEPS = ("open", "os.mkdir", "os.chmod", "os.rename", "os.link", "ctypes.call_function")

def pin_until(step, contents):
    left = step
    def count(event, args):
        nonlocal left
        left -= event in STEPS
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    place.pin(pins, skill(), contents)
    os._exit(0)

place = Place(Path(sys.argv[1]))
pins = place.pins()
versions = [place.version(text) for text in ("one", "two")]
place.pin(pins, skill(), versions[0])
for step in range(1, 300, int(sys.argv[2])):
    wanted = versions[step % 2]
    again = place.version(("one", "two")[step % 2])
    child = os.fork()
    if child == 0:
        pin_until(step, again)
    ended = os.waitpid(child, 0)[1]
    assert digest_of(pins, skill()) in {each.digest for each in versions}
    if ended == 0:
        break
assert ended == 0 and step > 10, (ended, step)
assert digest_of(pins, skill()) == wanted.digest
for version in versions:
    place.version(("one", "two")[versions.index(version)])
    place.pin(pins, skill(), version)
    assert digest_of(pins, skill()) == version.digest
assert len(list(place.tree.glob("new-*"))) <= 3
"""


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.whole)])
def test_killed_at_any_step_the_sandbox_sees_one_whole_version(tmp_path: Path, every: int) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "data"), str(every)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
