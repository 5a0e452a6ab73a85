"""A change is summed up, and the lines to look at first are named."""

import json
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, ProjectConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.workspace.projects import ClientFolders
from tests.e2e.attacks import on_docker_if_whole
from tests.shipped.conftest import learn, run
from tests.shipped.texts import commands

NAME = "code-review"
REVIEW = f"python3 /opt/skills/{NAME}/scripts/review_diff.py"
REPOSITORY = """\
set -e
git init -q -b main repo && cd repo
git config user.email a@example.com && git config user.name A
printf 'def pay():\\n    return 1\\n' > shop.py
printf 'import unittest, shop\\nclass T(unittest.TestCase):\\n' > test_shop.py
printf '    def test(self): self.assertEqual(shop.pay(), 1)\\n' >> test_shop.py
git add . && git commit -qm one && git switch -qc fix
printf 'def pay():\\n    try:\\n        return 1\\n' > shop.py
printf '    except Exception:\\n        pass\\n' >> shop.py
git commit -qam two
"""


async def test_every_command_works_as_written(session: Session) -> None:
    await learn(session, NAME)
    await run(session, REPOSITORY)
    review, test = commands(NAME)
    assert (await run(session, review, code=1)).stdout.splitlines() == [
        "shop.py  +4 -1",
        "1 files, +4 -1, 1 hints",
        "shop.py:4: swallowed-error: catches everything, or throws an error away: "
        "except Exception:",
    ]
    assert "OK" in (await run(session, test)).stderr


@on_docker_if_whole
async def test_new_files_patches_and_dangers_are_seen(session: Session) -> None:
    await learn(session, NAME)
    await run(session, REPOSITORY)
    nothing = await run(session, f"{REVIEW} --repo repo", code=2)
    assert "there is no change" in nothing.stderr
    code = "import os\nos.system(x)\npassword = 'hunter2hunter2'\n" + "y = 1\n" * 10
    await session.write_file("repo/new é.py", code.encode())
    await session.write_file("repo/data.bin", b"\0" * 100)
    await run(session, "cd repo && git rm -q test_shop.py && echo '{}' > package.json")
    result = await run(session, f"{REVIEW} --repo repo --json", code=1)
    found = json.loads(result.stdout)
    assert {file["path"]: (file["added"], file["removed"]) for file in found["files"]} == {
        "test_shop.py": (0, 3),
        "new é.py": (13, 0),
        "data.bin": (0, 0),
        "package.json": (1, 0),
    }
    assert {(hint["path"], hint["line"], hint["code"]) for hint in found["hints"]} == {
        ("new é.py", 2, "runs-text"),
        ("new é.py", 3, "secret"),
        ("data.bin", 0, "binary"),
        ("package.json", 0, "dependencies"),
        ("test_shop.py", 0, "test-off"),
    }
    patch = f"git -C repo diff main...HEAD | {REVIEW} --diff -"
    assert "1 files, +4 -1, 1 hints" in (await run(session, patch, code=1)).stdout
    assert "not a git repository" in (await run(session, f"{REVIEW} --repo /tmp", code=2)).stderr
    assert "bad revision" in (await run(session, f"{REVIEW} --repo repo nosuch", code=2)).stderr


@pytest.mark.parametrize("access", ["ro", "rw"])
async def test_the_users_own_folder_is_reviewed_where_it_is(
    config: Config, tmp_path: Path, access: str
) -> None:
    """It belongs to another user than the sandbox's, which git alone would refuse."""
    made = await anyio.run_process(["bash", "-c", REPOSITORY], cwd=tmp_path)
    assert made.returncode == 0
    folders = ClientFolders()
    project = ProjectConfig.model_validate({"access": access})
    showing = config.model_copy(update={"project": project})
    chat = ChatId("reader", "project")
    async with open_manager(showing, folders) as manager:
        session = await manager.session(chat)
        with folders.bring(chat, tmp_path / "repo"):
            await learn(session, NAME)
            result = await run(session, f"{REVIEW} --repo /project main", code=1)
    assert "1 files, +4 -1, 1 hints" in result.stdout
