"""What a skill's scripts lack in the very sandbox of a chat, on every backend."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager

ANN = ChatId("ann", "c1")
SCRIPT = """#!/usr/bin/env python3
import json
import zz_not_there
import zz_own
from zz_installed.part import x
import os, subprocess
subprocess.run(["zz-program", "x"])
subprocess.run(["bash", "-c", "cat x | zz-other"])
url = "https://api.acme.io"
key = os.environ["ACME_KEY"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "taught" / "needy"
    (place / "scripts").mkdir(parents=True)
    front = "name: needy\ndescription: Does."
    (place / "SKILL.md").write_text(f"---\n{front}\n---\nDo.\n")
    (place / "scripts" / "main.py").write_text(SCRIPT)
    (place / "scripts" / "zz_own.py").write_text("")
    plain = tmp_path / "taught" / "plain"
    plain.mkdir()
    (plain / "SKILL.md").write_text("---\nname: plain\ndescription: Does.\n---\nDo.\n")
    return tmp_path / "taught"


@pytest.fixture
async def manager(config: Config, folder: Path) -> AsyncGenerator[SessionManager]:
    skills = SkillsConfig(folders=(folder,), shipped=False)
    async with open_manager(config.model_copy(update={"skills": skills})) as opened:
        yield opened


async def test_what_is_lacking_is_told_with_its_files(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    got = await session.skills.activate("needy")
    lacking = {each.name: each for each in got.unmet if each.need != "network"}
    assert lacking.keys() == {"zz_not_there", "zz_installed", "zz-program", "zz-other"}
    assert lacking["zz-program"].needed_by == ("scripts/main.py",)
    assert lacking["zz_not_there"].fix == "pip install zz-not-there"
    assert got.findings
    assert got.findings.hosts == ("api.acme.io",)
    assert got.findings.variables == ("ACME_KEY",)


async def test_what_an_agent_has_installed_is_lacking_no_more(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')/zz_installed"
    made = await session.exec(f"mkdir -p {site} && touch {site}/__init__.py")
    assert made.success, made.stderr
    again = await session.skills.activate("needy")
    left = {each.name for each in again.unmet if each.need != "network"}
    assert left == {"zz_not_there", "zz-program", "zz-other"}


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


async def test_hosts_are_out_of_reach_where_there_is_no_network(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    got = await session.skills.activate("needy")
    assert {each.name for each in got.unmet if each.need == "network"} == {"api.acme.io"}


async def test_a_skill_without_scripts_needs_nothing(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    got = await session.skills.activate("plain")
    assert (got.unmet, got.findings) == ((), None)


async def test_the_shipped_skills_lack_nothing(config: Config) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(ANN)
        page = await session.skills.list(limit=100)
        got = [await session.skills.activate(listed.skill.uri) for listed in page.skills]
    assert len(got) >= 5
    assert {each.name: each.unmet for each in got if each.unmet or each.unchecked} == {}
