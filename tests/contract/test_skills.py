"""Skills in the sandbox, on every backend: at once, read-only, one version for each chat."""

import hashlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, PoolConfig, SkillsConfig
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session

ANN, BOB = ChatId("ann", "c1"), ChatId("bob", "c2")
VIEW = "/opt/skills"


def write(folder: Path, name: str, text: str = "one") -> None:
    """A skill with a script that has no right to be executed."""
    place = folder / name
    (place / "scripts").mkdir(parents=True, exist_ok=True)
    (place / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Does.\n---\nSays {text}.\n")
    script = place / "scripts" / "say.py"
    script.write_text(f"#!/usr/bin/env python3\nprint('{text}')\n")
    script.chmod(0o600)


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """Modes and bytes of all files."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "taught"
    write(made, "pdf")
    write(made, "doc")
    return made


@pytest.fixture
def taught(config: Config, folder: Path) -> Config:
    skills = SkillsConfig(folders=(folder,), shipped=False)
    return config.model_copy(update={"skills": skills})


@pytest.fixture
async def manager(taught: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(taught) as opened:
        yield opened


async def said(session: Session, command: str) -> str:
    result = await session.exec(command)
    assert result.success, result.stderr
    return result.stdout


async def test_a_new_workspace_is_empty_so_that_a_repository_is_cloned_into_it(
    manager: SessionManager,
) -> None:
    session = await manager.session(ANN)
    await session.skills.activate("pdf")
    assert await said(session, "ls -A") == ""
    await said(session, "git init -q ~/source && git clone -q ~/source . 2>&1")
    assert await said(session, "ls -A") == ".git\n"


async def test_an_agent_inside_finds_the_skills_in_its_home(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    await session.skills.activate("pdf")
    for agent in (".claude", ".agents"):
        assert await said(session, f"readlink ~/{agent}/skills") == f"{VIEW}\n"
        assert await said(session, f"tail -n1 ~/{agent}/skills/pdf/SKILL.md") == "Says one.\n"


async def test_what_a_chat_has_at_home_stays_and_is_not_followed(taught: Config) -> None:
    async with open_manager(taught) as manager:
        session = await manager.session(ANN)
        await said(session, "rm -r ~/.claude ~/.agents; mkdir -p lure ~/.agents/skills/mine")
        await said(session, "ln -s /workspace/lure ~/.claude")
        await session.reset()
        kept = "readlink ~/.claude; cd lure; ls -A; cd ~/.agents/skills; ls -A"
        assert await said(session, kept) == "/workspace/lure\nmine\n"


async def test_an_activated_skill_is_there_at_once_and_its_scripts_run(
    manager: SessionManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mcp_sandbox.sessions.skill_pins")
    session = await manager.session(ANN)
    assert await said(session, "echo ${SKILL_DIR-none}") == "none\n"
    got = await session.skills.activate("pdf")
    where = got.path_in_sandbox
    assert where
    assert got.body == b"Says one.\n"
    (line,) = (each for each in caplog.records if each.message == "skill activated")
    assert (vars(line)["chat"], vars(line)["skill"]) == ("ann/c1", got.uri)
    assert vars(line)["digest"] == got.digest
    assert await said(session, f"python3 {where}/scripts/say.py") == "one\n"
    assert await said(session, "$SKILL_DIR/scripts/say.py; echo $SKILL_DIR") == f"one\n{where}\n"
    ran = await session.run_code("import os; print(os.environ['SKILL_DIR'])")
    assert ran.stdout == f"{where}\n"
    assert (await session.read_file(f"{where}/SKILL.md")).data.endswith(b"Says one.\n")
    other = await session.skills.activate("doc")
    assert await said(session, "echo $SKILL_DIR") == f"{other.path_in_sandbox}\n"
    mine = await session.exec(["env"], env={"SKILL_DIR": "mine"})
    assert "SKILL_DIR=mine\n" in mine.stdout


async def test_a_misspelt_file_is_answered_with_the_nearest(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    await session.skills.activate("pdf")
    with pytest.raises(UnknownSkill, match=r"the nearest is 'scripts/say\.py'"):
        await session.skills.read("pdf", "scripts/say.sh")
    with pytest.raises(UnknownSkill, match="skill_activate lists its files"):
        await session.skills.read("pdf", "zzz")


async def test_a_chat_keeps_its_version_until_it_wants_another(
    taught: Config, folder: Path
) -> None:
    script = "python3 $SKILL_DIR/scripts/say.py"
    async with open_manager(taught) as manager:
        session = await manager.session(ANN)
        first = await session.skills.activate("pdf")
        write(folder, "pdf", "two")
        assert await said(session, script) == "one\n"
        again = await session.skills.activate("pdf")
        assert (again.digest, again.repeated) == (first.digest, True)
        assert again.drift == ("SKILL.md", "scripts/say.py")
        assert (await session.skills.read("pdf", "SKILL.md"))[1].endswith(b"Says one.\n")
        other = await manager.session(BOB)
        assert (await other.skills.activate("pdf")).body == b"Says two.\n"
        assert await said(other, script) == "two\n"
        assert await said(session, script) == "one\n"
        await session.reset()
        assert await said(session, script) == "one\n"
    async with open_manager(taught) as manager:
        session = await manager.session(ANN)
        assert await said(session, script) == "one\n"
        assert (await session.skills.activate("pdf")).digest == first.digest
        fresh = await session.skills.activate("pdf", refresh=True)
        assert (fresh.body, fresh.drift) == (b"Says two.\n", ())
        assert await said(session, script) == "two\n"
        await session.reset(keep_files=False)
        assert not session.skills._skills.find_activated(session.chat).active
        assert await said(session, f"echo ${{SKILL_DIR-none}}; cd {VIEW}; ls -A") == "none\n"


_READS_BOTH = """
import os
from pathlib import Path
place, seen = Path(os.environ["SKILL_DIR"]), []
while len(seen) < 200 or len(set(seen)) < 2:
    text = (place / "SKILL.md").read_text()
    assert text.endswith(("Says one.\\n", "Says two.\\n")), text
    seen.append(text[-5:-2])
print(sorted(set(seen)))
"""


async def test_reading_goes_on_while_versions_change(manager: SessionManager, folder: Path) -> None:
    session = await manager.session(ANN)
    await session.skills.activate("pdf")
    results: list[str] = []

    async def read() -> None:
        result = await session.run_code(_READS_BOTH, timeout_s=60)
        results.append(result.stdout + result.stderr)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        number = 0
        while not results:
            write(folder, "pdf", ("two", "one")[number % 2])
            await session.skills.activate("pdf", refresh=True)
            number += 1
    assert results == ["['one', 'two']\n"]


async def test_files_of_a_skill_are_no_news_and_no_weight(
    manager: SessionManager, folder: Path
) -> None:
    (folder / "pdf" / "large.bin").write_bytes(os.urandom(4_000_000))
    session = await manager.session(ANN)
    before = (await session.info()).usage.used_bytes
    await session.skills.activate("pdf")
    assert (await session.info()).usage.used_bytes < before + 100_000
    result = await session.exec("sleep 0.1; touch mine")
    assert result.changed_files == ("mine",)
    await (await manager.session(BOB)).skills.activate("pdf")
    assert (await session.exec("true")).changed_files == ()


async def test_searches_see_skills_only_when_they_ask_for_them(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    await session.skills.activate("pdf")
    script = f"{VIEW}/pdf/scripts/say.py"
    await session.write_file("own/say.py", b"print('mine')\n")
    assert list((await session.grep("print")).lines) == ["own/say.py:1:print('mine')"]
    assert list((await session.glob("**/*.py")).paths) == ["own/say.py"]
    for path in (VIEW, f"{VIEW}/pdf"):
        assert script in (await session.glob("**/*.py", path)).paths
        assert len((await session.grep("print", path)).lines) == 1


async def test_what_a_chat_throws_away_is_never_the_source(taught: Config, folder: Path) -> None:
    before = state(folder)
    async with open_manager(taught) as manager:
        kept = await manager.session(BOB)
        await kept.skills.activate("pdf")
        tree = taught.data_dir / "sandbox" / "skills" / BOB.user
        theirs = state(tree)
        session = await manager.session(ANN)
        await session.skills.activate("pdf")
        await session.exec(f"rm -rf {VIEW} ~/.claude *; chmod -R 777 {VIEW} /workspace")
        await session.reset(keep_files=False)
        await session.skills.activate("pdf")
        await manager.remove(ANN)
        assert await said(kept, "python3 $SKILL_DIR/scripts/say.py") == "one\n"
        assert state(tree) == theirs
    assert state(folder) == before


async def test_a_warm_sandbox_shows_skills_too(taught: Config) -> None:
    pooled = taught.model_copy(update={"pool": PoolConfig(size=1)})
    async with open_manager(pooled) as manager:
        if not manager.statistics().pool:
            pytest.skip("what holds files has no pool of ours")
        with anyio.fail_after(30):
            while manager.statistics().pool["idle"] < 1:
                await anyio.sleep(0.02)
        session = await manager.session(ANN)
        got = await session.skills.activate("pdf")
        assert manager.statistics().pool["hits"] == 1
        assert got.path_in_sandbox == f"{VIEW}/pdf"
        assert await said(session, "python3 $SKILL_DIR/scripts/say.py") == "one\n"
        assert not (await session.exec(f"touch {VIEW}/pdf/x")).success
