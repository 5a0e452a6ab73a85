"""What an agent gets to know of skills, through a real client."""

from pathlib import Path

import pytest

from tests.server.skills.conftest import in_pods_too
from tests.server.skills.taught import taught, write_skill

pytestmark = in_pods_too

BOTH_ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])
SKILL_TOOLS = {"skills_list", "skill_activate"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "skills"
    made.mkdir()
    return made


@pytest.mark.bubblewrap
@BOTH_ERAS
async def test_a_skill_is_found_and_read(data_root: Path, folder: Path, mode: str) -> None:
    place = write_skill(folder, "pdf-forms", description="Fills forms.", body=b"\n# Fill\n")
    (place / "notes.md").write_text("Mind the margins.\n")
    async with taught(data_root, folder, mode=mode) as agent:
        assert "\n[1 skill, all that there are]\n" in agent.instructions
        assert agent.instructions.endswith("\n- pdf-forms: Fills forms.")
        assert set(await agent.tools()) >= SKILL_TOOLS
        (found,) = (await agent.list(query="fill in a form"))["skills"]
        assert found["match"] == ["name: forms", "description: fills, forms", "headings: fill"]
        text = await agent.activate(found["name"])
        assert "\n\n# Fill\n\n</skill_content digest=" in text
        assert "notes.md (18 bytes, text)" in text
        assert "Mind the margins." in await agent.activate("pdf-forms", path="notes.md")


@BOTH_ERAS
async def test_without_skills_there_are_no_tools_for_them(
    data_root: Path, folder: Path, mode: str
) -> None:
    async with taught(data_root, folder, mode=mode) as agent:
        assert not SKILL_TOOLS & set(await agent.tools())
        assert "skill" not in agent.instructions
        write_skill(folder, "first")
        assert set(await agent.tools()) >= SKILL_TOOLS


async def test_switched_off_there_is_nothing_of_them(data_root: Path, folder: Path) -> None:
    write_skill(folder, "one")
    async with taught(data_root, folder, enabled=False) as agent:
        assert not SKILL_TOOLS & set(await agent.tools())
        assert "skill" not in agent.instructions


async def test_the_list_of_tools_stays_as_it_is_when_skills_change(
    data_root: Path, folder: Path
) -> None:
    write_skill(folder, "one")
    async with taught(data_root, folder) as agent:
        before = (await agent.client.list_tools()).model_dump_json()
        write_skill(folder, "two")
        assert (await agent.client.list_tools()).model_dump_json() == before
        assert (await agent.list())["total"] == 2
