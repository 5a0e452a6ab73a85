"""Which skills are offered, under which names, and where they come from."""

from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import InvalidArgument, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.catalogue import Catalogue
from tests.skills.folders import CHAT, library, looks_counted, write_skill


async def test_skills_of_all_roots_are_offered_and_earlier_roots_go_first(tmp_path: Path) -> None:
    data, mine, other = tmp_path / "data", tmp_path / "mine", tmp_path / "other"
    write_skill(other / "pdf")
    write_skill(mine / "pdf")
    write_skill(mine / "a")
    write_skill(data / "skills" / "local" / "pdf")
    write_skill(data / "skills" / "somebody" / "secret")
    catalogue = await library(data, mine, other).catalogue(CHAT)
    assert [(skill.uri, skill.shadowed_by) for skill in catalogue.skills] == [
        ("skill://assistant/a/SKILL.md", None),
        ("skill://assistant/pdf/SKILL.md", None),
        ("skill://assistant-2/pdf/SKILL.md", "skill://assistant/pdf/SKILL.md"),
        ("skill://user/pdf/SKILL.md", "skill://assistant/pdf/SKILL.md"),
    ]
    assert catalogue.problems == ()


async def test_a_skill_is_found_by_name_qualified_name_and_uri(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_skill(mine / "pdf")
    write_skill(other / "office" / "pdf")
    catalogue = await library(tmp_path, mine, other).catalogue(CHAT)
    first, second = catalogue.skills
    assert catalogue.find("pdf") is catalogue.find("assistant/pdf") is first
    for name in ("assistant-2/pdf", "assistant-2/office/pdf", second.uri):
        assert catalogue.find(name) is second
    with pytest.raises(UnknownSkill, match="the nearest is 'pdf'"):
        catalogue.find("pdg")


async def test_every_user_has_skills_of_their_own(tmp_path: Path) -> None:
    write_skill(tmp_path / "skills" / "ann" / "hers")
    write_skill(tmp_path / "skills" / "bob" / "his")
    shelves = library(tmp_path)
    for user, name in (("ann", "hers"), ("bob", "his")):
        catalogue = await shelves.catalogue(ChatId(user, "chat"))
        assert [skill.name for skill in catalogue.skills] == [name]


async def test_shipped_skills_are_there_unless_they_are_switched_off(tmp_path: Path) -> None:
    shipped = await library(tmp_path, shipped=True).catalogue(CHAT)
    assert "skill://shipped/using-this-sandbox/SKILL.md" in {skill.uri for skill in shipped.skills}
    assert shipped.problems == ()
    assert (await library(tmp_path).catalogue(CHAT)).skills == ()


async def test_files_are_listed_with_their_digests_and_read_by_their_paths(tmp_path: Path) -> None:
    folder = write_skill(tmp_path / "mine" / "pdf")
    (folder / "references").mkdir()
    (folder / "references" / "guide.md").write_bytes(b"# Guide\r\n")
    shelves = library(tmp_path, tmp_path / "mine")
    skill = (await shelves.catalogue(CHAT)).find("pdf")
    contents = await shelves.contents(skill)
    assert [file.path for file in contents.files] == ["SKILL.md", "references/guide.md"]
    assert await shelves.read(skill, "references/guide.md") == b"# Guide\r\n"
    with pytest.raises(UnknownSkill, match=r"nearest is 'references/guide\.md'"):
        await shelves.read(skill, "references/guid.md")


async def test_a_user_of_whom_no_chat_is_known_has_the_same_skills(tmp_path: Path) -> None:
    write_skill(tmp_path / "skills" / "ann" / "hers")
    shelves = library(tmp_path, workspace=True)
    assert await shelves.catalogue("ann") is await shelves.catalogue(ChatId("ann", "chat"))
    with pytest.raises(InvalidArgument):
        await shelves.catalogue("bob/../ann")


async def test_all_who_ask_at_the_same_time_are_served_by_few_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = looks_counted(monkeypatch)
    write_skill(tmp_path / "mine" / "one")
    shelves = library(tmp_path / "data", tmp_path / "mine")
    found: list[Catalogue] = []

    async def ask() -> None:
        found.append(await shelves.catalogue(CHAT))

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(ask)
    assert len(found) == 100
    assert len(set(map(id, found))) == 1
    assert len(looks) <= 10


async def test_an_edit_is_seen_at_the_next_call(tmp_path: Path) -> None:
    shelves = library(tmp_path / "data", tmp_path / "mine")
    for number in range(20):
        write_skill(tmp_path / "mine" / "one", description=f"Does {number}.")
        (skill,) = (await shelves.catalogue(CHAT)).skills
        assert skill.front.description == f"Does {number}."
