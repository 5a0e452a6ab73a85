"""`mcp-sandbox skills test` runs what a skill declares, in a sandbox of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mcp_sandbox.app.skill_tests import ExampleResult, try_out
from mcp_sandbox.cli import cli
from mcp_sandbox.config import Config
from tests.e2e.attacks import on_docker_if_whole
from tests.skills.folders import write_skill

FILES = {
    "scripts/add.py": "import sys\nprint(sum(map(int, sys.argv[1:])))\n",
    "scripts/broken.py": "def (\n",
    "tests/test_add.py": (
        "import subprocess, unittest\n\n"
        "class TestAdd(unittest.TestCase):\n"
        "    def test_sum(self):\n"
        "        done = subprocess.run(['python3', 'scripts/add.py', '1', '2'],\n"
        "                              capture_output=True, text=True)\n"
        "        self.assertEqual(done.stdout, '3\\n')\n"
    ),
    "tests/writes.sh": "touch here scripts/new && [ -e scripts/new ] && [ ! -e $SKILL_DIR/here ]",
    "tests/fails.sh": "echo wrong >&2; exit 3",
    "tests/hangs.sh": "sleep 600",
    "evals/evals.json": json.dumps(
        {
            "evals": [
                {"id": "sum", "command": "python3 $SKILL_DIR/scripts/add.py 2 3", "stdout": "5"},
                {"id": "wrong", "command": "echo 6", "stdout": "5"},
                {"id": "asked", "prompt": "Add two and three."},
            ]
        }
    ),
}


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    folder = write_skill(tmp_path / "adding")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return folder


async def trials_of(folder: Path, config: Config) -> dict[str, ExampleResult]:
    return {each.example.name: each for each in await try_out(folder, config, timeout_s=3)}


@on_docker_if_whole
async def test_each_example_is_run_in_a_fresh_copy_beside_the_mounted_skill(
    skill: Path, config: Config
) -> None:
    found = await trials_of(skill, config)
    assert {name: trial.verdict for name, trial in found.items()} == {
        "tests/fails.sh": "failed",
        "tests/hangs.sh": "failed",
        "tests/test_add.py": "passed",
        "tests/writes.sh": "passed",
        "evals/evals.json#sum": "passed",
        "evals/evals.json#wrong": "failed",
        "evals/evals.json#asked": "skipped",
        "scripts/add.py": "passed",
        "scripts/broken.py": "failed",
    }, found
    assert found["tests/fails.sh"].why == "exit code 3: wrong"
    assert found["tests/hangs.sh"].why == "it took too long"
    assert "'6'" in found["evals/evals.json#wrong"].why
    assert "SyntaxError" in found["scripts/broken.py"].why
    assert not config.data_dir.exists()


@pytest.mark.bubblewrap
async def test_skill_that_is_kept_from_models_can_be_tried(tmp_path: Path) -> None:
    folder = write_skill(tmp_path / "adding")
    document = folder / "SKILL.md"
    document.write_text(
        document.read_text().replace("name:", "disable-model-invocation: true\nname:")
    )
    (folder / "tests").mkdir()
    (folder / "tests" / "it.sh").write_text('grep -q "Do it" "$SKILL_DIR/SKILL.md"')
    (trial,) = await try_out(folder, Config(data_dir=tmp_path / "data", backend="bubblewrap"))
    assert (trial.verdict, trial.why) == ("passed", "")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["skills", "test", *arguments, "--backend", "bubblewrap"])


@pytest.mark.bubblewrap
def test_command_reports_a_table_or_json_and_fails_when_something_fails(tmp_path: Path) -> None:
    folder = write_skill(tmp_path / "adding")
    assert "nothing to run" in run(str(folder)).stdout
    (folder / "tests").mkdir()
    (folder / "tests" / "good.sh").write_text("true")
    done = run(str(folder))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    (folder / "tests" / "bad.sh").write_text("printf '\\033[2Jno' >&2; false")
    failed = run(str(folder))
    assert failed.exit_code == 1
    assert "\x1b" not in failed.stdout
    rows: list[dict[str, Any]] = json.loads(run(str(folder), "--json").stdout)
    assert [(row["name"], row["verdict"]) for row in rows] == [
        ("tests/bad.sh", "failed"),
        ("tests/good.sh", "passed"),
    ]


@pytest.mark.bubblewrap
def test_shipped_skills_pass(tmp_path: Path) -> None:
    for folder in sorted((Path(__file__).parents[2] / "skills").iterdir()):
        done = run(str(folder), "--data", str(tmp_path))
        assert done.exit_code == 0, done.output
