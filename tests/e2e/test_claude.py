"""Claude starts a server of its own: nothing else than the project's file is needed."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.claude import Claude, consent
from tests.e2e.messages_api import Script
from tests.server.skills.taught import write_skill

ROOT = Path(__file__).parents[2]
CODE = "open('note.txt', 'w').write('kept\\n'); print(6 * 7)"
SKILL = "python-data-analysis"
SCRIPT = f"/opt/skills/{SKILL}/scripts/profile_table.py"
LEARNED = (
    ("mcp__sandbox__skills_list", {"query": "statistics of a csv file"}),
    ("mcp__sandbox__skill_activate", {"name": SKILL}),
    ("mcp__sandbox__skill_activate", {"name": SKILL, "path": "references/sql-recipes.md"}),
    ("mcp__sandbox__write_file", {"path": "sales.csv", "content": "day,amount\n1,2.5\n2,3.5\n"}),
    ("mcp__sandbox__exec", {"command": f"python3 {SCRIPT} sales.csv"}),
    ("mcp__sandbox__exec", {"command": f"echo x >> {SCRIPT}; echo x > /opt/skills/new"}),
)
CALLS = (
    ("mcp__sandbox__run_code", {"code": CODE}),
    ("mcp__sandbox__read_file", {"path": "note.txt"}),
)


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend_name", [BUBBLEWRAP, DOCKER])
async def test_claude_runs_code_and_reads_the_file_that_it_made(
    backend_name: str, npm_cache: Path, tmp_path: Path
) -> None:
    programs = npm.installed("claude", npm_cache)
    project = make_project(tmp_path, backend_name)
    script = Script(CALLS, last_words="The note says: kept.")
    await Claude(programs, project, tmp_path / "home", {}).follow(script)
    assert script.heard[0].startswith("42\n")
    assert script.heard[1] == "     1\tkept"


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend_name", [BUBBLEWRAP, DOCKER])
async def test_claude_finds_a_skill_reads_it_and_runs_its_script(
    backend_name: str, npm_cache: Path, tmp_path: Path
) -> None:
    programs = npm.installed("claude", npm_cache)
    project = make_project(tmp_path, backend_name)
    script = Script(LEARNED, last_words="The mean is 3.0.")
    await Claude(programs, project, tmp_path / "home", {}).follow(script)
    listed, text, reference, _, ran, attack = (script.heard[n] for n in range(len(LEARNED)))
    assert json.loads(listed)["skills"][0]["name"] == SKILL
    shipped = ROOT / "skills" / SKILL
    assert (shipped / "SKILL.md").read_text().split("---\n", 2)[2].strip() in text
    assert (shipped / "references/sql-recipes.md").read_text().strip() in reference
    assert "sales.csv: 2 rows, 2 columns" in ran
    assert re.search(r"amount +number +0 +2 +2.5 +3.5 +3.0 +3.0", ran)
    refusals = re.findall("Read-only file system|Permission denied", attack)
    assert len(refusals) == 2, attack


@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_claude_shows_every_skill_and_a_long_text_as_a_whole(
    npm_cache: Path, tmp_path: Path
) -> None:
    programs = npm.installed("claude", npm_cache)
    skills = tmp_path / "skills"
    for number in range(40):
        write_skill(skills, f"skill-{number:02}", description="What it is for. " * 30)
    body = b"".join(b"%05d what to do then\n" % number for number in range(4000))
    write_skill(skills, "long", body=body)
    project = make_project(tmp_path, "bubblewrap", "--skills", str(skills))
    script = Script((("mcp__sandbox__skill_activate", {"name": "long"}),), last_words="Done.")
    await Claude(programs, project, tmp_path / "home", {}).follow(script)
    assert body.decode() in script.heard[0]
    assert "call skill_activate with its name" in script.told
    assert [n for n in range(40) if f"- skill-{n:02}: What it is for." not in script.told] == []


def make_project(folder: Path, backend: str, *more: str) -> Path:
    """A project as a user sets it up: `.mcp.json`, and the consent to it."""
    arguments = ["-m", "mcp_sandbox", "stdio", "--chat", "claude", "--backend", backend]
    arguments += ["--data", str(folder / "data"), *more]
    server = {"command": sys.executable, "args": arguments, "env": {"PYTHONPATH": str(ROOT)}}
    project = folder / "project"
    project.mkdir()
    (folder / "home").mkdir()
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"sandbox": server}}))
    consent(project)
    return project
