"""A chat that has matplotlib, pandas and pillow in its home, as `pip install --user` puts them."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sandbox.sessions.session import Session

PACKAGES = ("matplotlib", "pandas", "pillow")
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
# Of wheels in the workspace.
INSTALL = """
site=$(python3 -c 'import site; print(site.getusersitepackages())') && mkdir -p "$site" &&
for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site" || exit; done; rm -r wheels
python3 -c 'import matplotlib.pyplot, pandas, PIL; matplotlib.pyplot.figure().canvas.draw()'
"""


@functools.cache
def wheels(version: str, folder: Path) -> list[Path]:
    """Return the packages for this version of Python, from the machine's own index; once a run."""
    folder /= version
    options = ("--quiet", "--only-binary=:all:", "--python-version", version, "--dest", str(folder))
    pip = [sys.executable, "-m", "pip", "download", *options, *PACKAGES]
    found = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=300)
    if found.returncode:
        pytest.skip(f"pip has no index with {', '.join(PACKAGES)}: {found.stderr.strip()[-300:]}")
    return sorted(folder.glob("*.whl"))


async def install(session: Session, folder: Path) -> None:
    """Put the packages into the home of a chat."""
    version = (await session.run_code(VERSION)).stdout.strip()
    for wheel in wheels(version, folder):
        await session.write_file(f"wheels/{wheel.name}", wheel.read_bytes())
    installed = await session.exec(INSTALL, timeout_s=240)
    assert installed.success, installed.stderr
