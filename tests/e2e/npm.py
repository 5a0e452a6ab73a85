"""Programs of other projects from npm, with a Node of their own, kept in pytest's cache folder."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mcp_sandbox import durable

NODE = "node@22.23.3"
_PINS = (Path(__file__).parents[2] / "images/claude/programs.txt").read_text().splitlines()
_PINNED = {name: version for name, _, version in (line.rpartition("@") for line in _PINS)}
PACKAGES: Mapping[str, str] = {
    "inspector": "@modelcontextprotocol/inspector@2.12.0",
    "conformance": "@modelcontextprotocol/conformance@0.2.0-alpha.12",
    "vite": "vite@6.4.6",
    # The version that the image has.
    "claude": f"@anthropic-ai/claude-code@{_PINNED['@anthropic-ai/claude-code-linux-ARCH']}",
}
# Half a gigabyte: nobody should get it by running all tests.
ON_REQUEST = frozenset({"claude"})
_INSTALL_S = 280


class NotInstalled(Exception):
    """A package could not be had; the message says why."""


@functools.cache
def installed(need: str, cache: Path) -> Path:
    """Install a package with Node beside it, if it is not there; returns the folder of programs.

    Raises:
        NotInstalled: npm is missing or fails.
    """
    folder = cache / need
    wanted = [NODE, PACKAGES[need]]
    with durable.locked(cache / f"{need}.lock"):
        if not all(_is_there(folder, package) for package in wanted):
            _install(folder, wanted)
    return folder / "node_modules" / ".bin"


def _is_there(folder: Path, package: str) -> bool:
    name, _, version = package.rpartition("@")
    found = folder / "node_modules" / name / "package.json"
    return found.exists() and json.loads(found.read_text())["version"] == version


def _install(folder: Path, packages: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("npm is not installed: install Node.js with npm")
    # What an interrupted run left would look complete.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise NotInstalled(f"npm install of {packages} took over {_INSTALL_S} s") from exc
    node = folder / "node_modules" / ".bin" / "node"
    if done.returncode or not os.access(node, os.X_OK):
        raise NotInstalled(f"npm install of {packages} failed: {done.stderr[-500:]}")
