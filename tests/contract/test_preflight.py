"""What a skill declares and the very sandbox of a chat lacks, on every backend."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager

ANN = ChatId("ann", "c1")
NEEDY = """---
name: needy
description: Does.
compatibility: Needs `bash` and `zz-program`.
metadata: {acme: {requires: {bins: [ls, zz-other]}}}
---
Do.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "taught" / "needy"
    (place / "scripts").mkdir(parents=True)
    (place / "SKILL.md").write_text(NEEDY)
    (place / "requirements.txt").write_text("zz_installed>=1\nzz-not.there\n")
    (place / "scripts" / "package.json").write_text('{"dependencies": {"zz-node": "1"}}')
    # What a script uses and nothing declares is not asked for.
    (place / "scripts" / "main.py").write_text("import zz_undeclared\n")
    return tmp_path / "taught"


@pytest.fixture
async def manager(config: Config, folder: Path) -> AsyncGenerator[SessionManager]:
    skills = SkillsConfig(folders=(folder,), shipped=False)
    async with open_manager(config.model_copy(update={"skills": skills})) as opened:
        yield opened


async def test_what_is_lacking_is_told_with_where_it_is_declared(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    got = await session.skills.activate("needy")
    assert {(each.name, each.where, each.fix) for each in got.unmet} == {
        ("zz-program", "compatibility", ""),
        ("zz-other", "metadata", ""),
        ("zz_installed", "requirements.txt", "pip install zz_installed"),
        ("zz-not.there", "requirements.txt", "pip install zz-not.there"),
        ("zz-node", "scripts/package.json", "npm install zz-node"),
    }
    assert {each.name for each in got.needs if each not in got.unmet} == {"bash", "ls"}


async def test_what_an_agent_has_installed_is_lacking_no_more(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    site = (
        "$(python3 -c 'import site; print(site.getusersitepackages())')/zz_installed-1.0.dist-info"
    )
    facts = "Metadata-Version: 2.1\\nName: zz-installed\\nVersion: 1.0\\n"
    made = await session.exec(
        f"mkdir -p {site} node_modules/zz-node && printf '{facts}' > {site}/METADATA"
        # A program of the workspace takes no part.
        " && echo 'raise SystemExit(1)' > json.py"
    )
    assert made.success, made.stderr
    again = await session.skills.activate("needy")
    assert {each.name for each in again.unmet} == {"zz-program", "zz-other", "zz-not.there"}


async def test_a_sandbox_that_does_not_tell_what_it_has_is_no_obstacle(
    manager: SessionManager,
) -> None:
    session = await manager.session(ANN)
    made = await session.exec(
        "mkdir -p ~/.local/bin && printf '#!/bin/sh\\necho [1]\\n' > ~/.local/bin/python3 "
        "&& chmod +x ~/.local/bin/python3 && hash -r && python3 --version"
    )
    assert made.stdout == "[1]\n"
    got = await session.skills.activate("needy")
    assert got.body == b"Do.\n"
    assert got.unmet == ()
    assert got.unchecked.startswith("the sandbox did not tell what it has")


async def test_the_shipped_skills_lack_nothing(config: Config) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        page = await session.skills.list(limit=100)
        got = [await session.skills.activate(listed.skill.uri) for listed in page.skills]
    assert len(got) >= 5
    assert {each.name: each.unmet for each in got if each.unmet or each.unchecked} == {}
