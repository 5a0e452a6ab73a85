"""A client's folder is what was checked, or it is not shown."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, ProjectConfig
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.workspace import projects
from mcp_sandbox.workspace.projects import ClientFolders, Steps, check_folder
from tests.contract.conftest import CHAT


async def test_a_folder_that_a_link_replaces_after_the_check_is_not_shown(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write beside it could otherwise have any folder of the host mounted."""
    folder = tmp_path / "above" / "sandbox"
    folder.mkdir(parents=True)

    def check_and_swap(named: Path, private: Sequence[Path]) -> Steps:
        found = check_folder(named, private)
        checked, _ = found[-1]
        checked.parent.rename(tmp_path / "away")
        # It has a folder of that name, with the files of every chat.
        checked.parent.symlink_to(config.data_dir)
        return found

    monkeypatch.setattr(projects, "check_folder", check_and_swap)
    folders = ClientFolders()
    showing = config.model_copy(update={"project": ProjectConfig(access="rw")})
    async with open_manager(showing, folders) as manager:
        session = await manager.session(CHAT)
        with folders.bring(CHAT, folder):
            with pytest.raises(SandboxGone, match="replaced while the sandbox was made"):
                await session.exec("touch ran; ls /project")
            looked = await session.exec("ls /project; ls")
    assert "cannot access" in looked.stderr
    assert looked.stdout == ""
