"""A sandbox that does not have its mounts where they should be is refused."""

import os
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.sandbox_records import find_missing_mounts, sandbox_user
from mcp_sandbox.errors import InsecureSandbox
from mcp_sandbox.models import Mount, SandboxSpec
from tests.conftest import configured

_TABLE = """\
359 357 254:0 /data/workspace /workspace rw,nosuid - ext4 /dev/vda rw
360 359 254:0 /data/claude /workspace/.claude rw,nosuid - ext4 /dev/vda rw
361 360 254:0 /data/view /workspace/.claude/skills ro,nosuid shared:1 - ext4 /dev/vda rw
"""
_WANTED = {"/workspace": False, "/workspace/.claude": False, "/workspace/.claude/skills": True}


def test_mounts_as_they_should_be_are_fine() -> None:
    assert find_missing_mounts(_TABLE, _WANTED) == []


def test_a_mount_that_is_missing_or_writable_is_told() -> None:
    view = "/workspace/.claude/skills"
    assert find_missing_mounts("", _WANTED)[-1] == f"nothing is mounted at {view}"
    writable = f"{view} can be written to and should be read-only"
    assert find_missing_mounts(_TABLE.replace("ro,", "rw,"), _WANTED) == [writable]
    above = f"362 360 254:0 /data/other {view} rw - ext4 /dev/vda rw\n"
    assert find_missing_mounts(_TABLE + above, _WANTED) == [writable]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    ],
)
async def test_a_mount_that_a_link_led_elsewhere_is_refused(name: str, data_root: Path) -> None:
    config = configured(name, data_root)
    assert config.backend != "auto"

    def make() -> tuple[Mount, ...]:
        targets = {"workspace": "/workspace", "home": "/home/sandbox", "claude": "/workspace/.a/b"}
        for each in targets:
            (data_root / each).mkdir(mode=0o700, parents=True)
            os.chown(data_root / each, *sandbox_user())
        (data_root / "home" / "b").mkdir()
        (data_root / "workspace" / ".a").symlink_to("../home/sandbox")
        return tuple(Mount(data_root / each, target) for each, target in targets.items())

    mounts = await to_thread.run_sync(make)
    async with open_backend(config.backend, config) as backend:
        with pytest.raises(InsecureSandbox, match=r"nothing is mounted at /workspace/\.a/b"):
            await backend.create(SandboxSpec(mounts, idle_s=30))
        assert await backend.running() == []
