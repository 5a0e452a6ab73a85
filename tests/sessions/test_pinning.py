"""What a chat gets of a skill is one version of it, whole, whatever happens to the source."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.errors import Busy, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.skill_pins import Activation, ChatPins
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.skill import Skill
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import SHOWN
from mcp_sandbox.workspace.users import SandboxUsers

CHAT = ChatId("ann", "c1")
ME = (os.geteuid(), os.getegid())
USERS = SandboxUsers(one=ME)
_HEAD = "---\nname: pdf\ndescription: Does.\n---\n"


class Restless(SkillLibrary):
    """A library whose skill is edited while it is copied."""

    edit: Callable[[], None] = staticmethod(lambda: None)

    async def read(self, skill: Skill, path: str) -> bytes:
        data = await super().read(skill, path)
        await to_thread.run_sync(self.edit)
        return data


class Place:
    """A skill of two files, and a chat."""

    def __init__(self, tmp_path: Path) -> None:
        self.data = tmp_path / "data"
        self.folder = tmp_path / "taught" / "pdf"
        self.write(0)
        self.workspaces = Workspaces(self.data, users=USERS, skills=True)
        settings = SkillsConfig(folders=(tmp_path / "taught",), shipped=False)
        self.library = Restless(settings, self.data)
        self.pinning = ChatPins(CHAT, self.workspaces)

    def write(self, number: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "SKILL.md").write_text(f"{_HEAD}{number}")
        (self.folder / "notes.md").write_text(f"{number}")

    async def activate(self, *, refresh: bool = False) -> Activation:
        await self.workspaces.open(CHAT)
        skill = (await self.library.catalogue(CHAT)).find("pdf")
        return await self.pinning.activate(skill, self.library, refresh=refresh)

    async def shown(self) -> tuple[str, ...]:
        tree = self.workspaces.skills_of(CHAT)
        assert tree
        files = ("SKILL.md", "notes.md")
        return await to_thread.run_sync(
            lambda: tuple((tree / SHOWN / "pdf" / name).read_text()[-1] for name in files)
        )


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    return await to_thread.run_sync(Place, tmp_path)


async def test_a_source_that_changes_once_meanwhile_is_copied_anew(place: Place) -> None:
    edits = iter(range(5, 6))
    place.library.edit = lambda: place.write(next(edits, 5))
    pinned = await place.activate()
    assert pinned.body.endswith(b"5")
    assert await place.shown() == ("5", "5")
    assert pinned.drift == ()


async def test_a_source_that_changes_all_the_time_is_refused_and_never_torn(place: Place) -> None:
    first = await place.activate()
    count = iter(range(1, 1000))
    place.library.edit = lambda: place.write(next(count))
    await to_thread.run_sync(place.write, 1000)
    with pytest.raises(Busy, match="just being changed"):
        await place.activate(refresh=True)
    assert await place.shown() == ("0", "0")
    again = await place.activate()
    assert again.contents.digest == first.contents.digest
    assert again.drift == ("SKILL.md", "notes.md")


async def test_a_source_that_is_gone_leaves_the_chat_its_version(place: Place) -> None:
    first = await place.activate()
    skill = (await place.library.catalogue(CHAT)).find("pdf")
    await to_thread.run_sync((place.folder / "SKILL.md").unlink)
    kept = await place.pinning.activate(skill, place.library, refresh=False)
    assert kept.contents.digest == first.contents.digest
    assert kept.drift == ("SKILL.md", "notes.md")
    with pytest.raises(UnknownSkill):
        await place.pinning.activate(skill, place.library, refresh=True)
    assert await place.shown() == ("0", "0")


async def test_a_refresh_without_a_change_leaves_all_as_it_is(place: Place) -> None:
    await place.activate()
    tree = place.workspaces.skills_of(CHAT)
    assert tree
    before = await to_thread.run_sync((tree / SHOWN / "pdf").stat)
    await place.activate(refresh=True)
    after = await to_thread.run_sync((tree / SHOWN / "pdf").stat)
    assert after.st_ino == before.st_ino
