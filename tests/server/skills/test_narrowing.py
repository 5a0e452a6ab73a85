"""What active skills take away from the tools, where the operator wants them to."""

from pathlib import Path

import pytest

from tests.server.scripted import text_of
from tests.server.skills.conftest import in_pods_too
from tests.server.skills.taught import Taught, taught, write_skill

pytestmark = in_pods_too


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "skills"
    made.mkdir()
    write_skill(made, "review", allowed_tools="Read Grep Bash(git:*)")
    write_skill(made, "notes", allowed_tools="[Write]")
    write_skill(made, "free")
    return made


async def said(agent: Taught, tool: str, **arguments: object) -> str:
    result = await agent.client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    return text_of(result)


async def test_nothing_is_taken_away_unless_the_operator_wants_it(
    data_root: Path, folder: Path
) -> None:
    async with taught(data_root, folder) as agent:
        await agent.activate("review")
        assert "allowed-tools" not in await said(agent, "exec", command="echo hi")


async def test_calls_that_no_active_skill_names_are_refused_with_words(
    data_root: Path, folder: Path
) -> None:
    async with taught(data_root, folder, narrow="deny") as agent:
        await said(agent, "exec", command="echo before")
        await agent.activate("free")
        await said(agent, "exec", command="echo still")
        await agent.activate("review")
        why = await agent.refused("exec", command="touch made")
        assert "allowed-tools of the active skills (review: Read, Grep, Bash(git:*))" in why
        await agent.refused("exec", command="git --version; touch made")
        await agent.refused("write_file", path="made", content="x")
        assert "git version" in await said(agent, "exec", command="git --version")
        await said(agent, "sandbox_info")
        await agent.activate("notes")
        await said(agent, "write_file", path="made", content="x")
        assert "made" in await said(agent, "list_files")
        await agent.refused("glob", pattern="*")


async def test_with_warnings_the_call_is_made_and_the_result_says_so_once(
    data_root: Path, folder: Path
) -> None:
    async with taught(data_root, folder, narrow="warn") as agent:
        await agent.activate("notes")
        text = await said(agent, "exec", command="echo hi")
        assert text.startswith("hi")
        assert text.count("[note: this call of exec is not among the allowed-tools") == 1
        assert "note:" not in await said(agent, "write_file", path="a", content="x")
        # A structured result has no room for it: the next one tells.
        await said(agent, "list_files")
        assert "this call of list_files" in await said(agent, "write_file", path="b", content="x")


async def test_a_model_cannot_lift_it_by_a_reset(data_root: Path, folder: Path) -> None:
    async with taught(data_root, folder, narrow="deny") as agent:
        await agent.activate("notes")
        await agent.refused("sandbox_reset", keep_files=False)
        await agent.refused("exec", command="true")


async def test_the_text_of_a_skill_says_what_its_scripts_lack(
    data_root: Path, folder: Path
) -> None:
    script = folder / "free" / "scripts" / "a.py"
    script.parent.mkdir()
    script.write_text("import zz_pdf\nimport os\nkey = os.environ['ACME_KEY']\n")
    async with taught(data_root, folder) as agent:
        text = await agent.activate("free")
        line = "Missing in this sandbox: Python module zz_pdf, for scripts/a.py"
        assert f"[{line} (pip install zz-pdf).]" in text
        assert "variables: ACME_KEY" in text
        for name in "bcd":
            (script.parent / f"{name}.py").write_text("import zz_pdf\n")
        text = await agent.activate("free", refresh=True)
        assert "zz_pdf, for scripts/a.py, scripts/b.py and 2 more (pip" in text
        meta = await agent.meta("free", refresh=True)
        assert meta["unmet"][0]["name"] == "zz_pdf"
        assert meta["findings"]["variables"] == ["ACME_KEY"]
