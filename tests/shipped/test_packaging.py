"""Whoever installs the program has the skills, and a checkout offers its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mcp_sandbox.skills.scan import shipped_folder
from tests.shipped.texts import NAMES, SHIPPED


def test_a_checkout_offers_the_skills_in_it() -> None:
    assert shipped_folder() == SHIPPED


@pytest.mark.slow
def test_a_wheel_carries_them_whole(tmp_path: Path) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    # The build is isolated: uv fetches the build backend, as for any user.
    command([uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, SHIPPED.parent])
    (wheel,) = tmp_path.glob("*.whl")
    command([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv/bin/python"
    command([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel])
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # What it depends on is the same as here; of the program itself the wheel's comes first.
    (site / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    listed = command([tmp_path / "venv/bin/mcp-sandbox", "skills", "list", "--json"], **home)
    folders = {skill["name"]: Path(skill["folder"]) for skill in json.loads(listed)}
    assert folders == {name: site / "mcp_sandbox/_skills" / name for name in NAMES}
    for path in SHIPPED.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            carried = site / "mcp_sandbox/_skills" / path.relative_to(SHIPPED)
            assert carried.read_bytes() == path.read_bytes()


def command(arguments: list[str | Path], **more: str) -> str:
    done = subprocess.run(
        arguments,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout
