from pathlib import Path

import pytest


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with a home beside it, which file operations then use."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("MCP_SANDBOX_WORKSPACE", str(folder))
    monkeypatch.setenv("MCP_SANDBOX_HOME", str(tmp_path / "home"))
    return folder
