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
    "ccr": f"@musistudio/claude-code-router@{_PINNED['@musistudio/claude-code-router']}",
    "codex": "@openai/codex@0.171.0",
    "gemini": "@google/gemini-cli@0.61.0",
    "opencode": "opencode-ai@1.18.33",
    "copilot": "@github/copilot@1.0.102",
}
# Two gigabytes: nobody should get them by running all tests.
ON_REQUEST = frozenset({"claude", "codex", "gemini", "opencode", "copilot"})
_INSTALL_S = 280


class NotInstalled(Exception):
    """A package could not be had; the message says why."""


@functools.cache
def installed(need: str, cache: Path) -> Path:
    """Install a package with Node beside it, if it is not there; returns the folder of programs.

    Raises:
        NotInstalled: npm is missing or fails.
    """
    return _put(cache, need, PACKAGES[need], _put(cache, "node", NODE) / "node")


def _put(cache: Path, name: str, package: str, node: Path | None = None) -> Path:
    """Install a package into the folder of this name, if it is not there, and link Node beside."""
    folder = cache / name
    programs = folder / "node_modules" / ".bin"
    with durable.locked(cache / f"{name}.lock"):
        if not _is_there(folder, package):
            _install(folder, package, node)
        if node and not (programs / "node").exists():
            (programs / "node").symlink_to(node)
    return programs


def _is_there(folder: Path, package: str) -> bool:
    name, _, version = package.rpartition("@")
    found = folder / "node_modules" / name / "package.json"
    return found.exists() and json.loads(found.read_text())["version"] == version


def _install(folder: Path, package: str, node: Path | None) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("npm is not installed: install Node.js with npm")
    # What an interrupted run left would look complete.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # What a package runs as it is installed finds the same Node.
    path = f"{node.parent}:{os.environ['PATH']}" if node else os.environ["PATH"]
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise NotInstalled(f"npm install of {package} took over {_INSTALL_S} s") from exc
    if done.returncode:
        raise NotInstalled(f"npm install of {package} failed: {done.stderr[-500:]}")
