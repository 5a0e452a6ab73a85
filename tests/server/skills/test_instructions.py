"""What a client is told of skills when it connects."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.types import Implementation
from typer.testing import CliRunner

from mcp_sandbox.cli import cli
from tests.server.skills.shelves import client_of, offering
from tests.server.skills.taught import taught, write_skill

pytestmark = pytest.mark.bubblewrap

BEGIN = "Skills are expert instructions"
SENTENCE = "before you begin a task that one of them is for, call skill_activate"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "skills"
    made.mkdir()
    return made


def about_skills(instructions: str) -> str:
    return instructions[instructions.index(BEGIN) :]


@pytest.mark.parametrize(
    ("mode", "number"), [("auto", 1), ("legacy", 20), ("auto", 300), ("legacy", 1500)]
)
async def test_the_catalogue_keeps_within_its_budget_and_gives_account(
    data_root: Path, folder: Path, mode: str, number: int
) -> None:
    for n in range(number):
        write_skill(folder, f"skill-{n:04}", description="What it is for. " * 30)
    async with taught(data_root, folder, mode=mode) as agent:
        told = about_skills(agent.instructions)
        assert len(told) <= 8000
        assert SENTENCE in told
        account = told.splitlines()[1]
        expected = {
            1: "[1 skill, all that there are]",
            20: "[20 skills; 20 end with … for lack of room: skills_list has all of it]",
            300: "[300 skills, with no room for what they are for: skills_list says it]",
            1500: "[1,500 skills, too many to name here: find them with skills_list and a query; "
            "they are about:]",
        }
        assert account == expected[number]
        assert sum(f"skill-{n:04}" in told for n in range(number)) == (
            number if number < 1500 else 0
        )


async def test_no_room_at_all_still_says_how_to_find_them(data_root: Path, folder: Path) -> None:
    write_skill(folder, "one")
    async with taught(data_root, folder, catalogue=0) as agent:
        told = about_skills(agent.instructions)
        assert SENTENCE in told
        assert "find them with skills_list and a query]" in told
        assert "one:" not in told


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_claude_is_told_no_more_than_it_shows(
    data_root: Path, folder: Path, mode: Any
) -> None:
    for n in range(40):
        write_skill(folder, f"skill-{n:04}", description="What it is for. " * 20)
    claude = Implementation(name="claude-code", version="2")
    async with taught(data_root, folder, mode=mode) as agent:
        assert len(agent.instructions) > 4096
        async with agent.another(client_info=claude, mode=mode) as cut:
            assert len(cut.instructions) <= 4096
            assert "skill-0039" in cut.instructions


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_each_user_is_told_of_the_own_skills_only(
    data_root: Path, folder: Path, mode: str
) -> None:
    write_skill(folder, "shared")
    write_skill(data_root / "skills" / "alice", "of-alice")
    write_skill(data_root / "skills" / "bob", "of-bob")
    async with offering(data_root, folder) as web:
        for user, own, other in (("alice", "of-alice", "of-bob"), ("bob", "of-bob", "of-alice")):
            async with client_of(web, mode, user) as client:
                told = client.instructions or ""
                assert own in told
                assert "shared" in told
                assert other not in told


async def test_who_has_no_skill_sees_no_tool_beside_one_who_has(data_root: Path) -> None:
    write_skill(data_root / "skills" / "alice", "of-alice")
    async with offering(data_root) as web:
        for user, number in (("alice", 16), ("bob", 14)):
            async with client_of(web, "auto", user) as client:
                assert len((await client.list_tools()).tools) == number
                assert (BEGIN in (client.instructions or "")) == (user == "alice")


@pytest.mark.slow
def test_folders_are_given_on_the_command_line(tmp_path: Path) -> None:
    write_skill(tmp_path / "one", "first-skill")
    write_skill(tmp_path / "two", "second-skill")
    about = {"name": "raw", "version": "1"}
    asked = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about}
    line = json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": asked})
    folders = ["--skills", str(tmp_path / "one"), "--skills", str(tmp_path / "two")]
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sandbox", "stdio", "--data", str(tmp_path / "data"), *folders],
        input=f"{line}\n",
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    told = json.loads(done.stdout)["result"]["instructions"]
    for name in ("first-skill", "second-skill", "using-this-sandbox"):
        assert f"- {name}: " in told


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    for command in ("stdio", "serve"):
        done = CliRunner().invoke(cli, [command, "--skills", str(tmp_path / "absent")])
        assert done.exit_code == 2
        assert "does not exist" in re.sub(r"[│\s]+", " ", done.output)
