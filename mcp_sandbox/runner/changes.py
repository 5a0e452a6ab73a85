"""Which files of the workspace a command created or changed, within a small budget of time."""

from __future__ import annotations

import os
import time

# Enough for a project; beyond it looking would cost more than the command.
_CLOCK_REALTIME_COARSE = 5  # Linux's number; Python has no name for it.
_BUDGET_S = 0.05
_MOST_NAMES = 20
# In JSON a character may take six bytes; all of them go into one message of 64 KiB.
_LONGEST_NAME = 500
_SKIPPED = {".git", ".mcp-sandbox", "node_modules", "__pycache__", ".venv"}
# No command changes them; whoever shares such a file does, by having it.
_SKILLS = "/.claude/skills"


def now_coarse() -> int:
    """The clock that stamps files, in ns: the precise one would run ahead of it."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def changed_since(since_ns: int, workspace: str) -> list[str] | None:
    """Paths below the workspace whose data or inode changed; None when there was too much to see.

    Links are not followed; at most 20 names.
    """
    deadline = time.monotonic() + _BUDGET_S
    found: list[str] = []
    pending = [workspace]
    while pending and len(found) < _MOST_NAMES:
        if time.monotonic() > deadline:
            return None
        try:
            found += _changed_in(pending.pop(), since_ns, pending)
        except OSError:
            # Removed or closed to us meanwhile.
            continue
    names = sorted(
        os.fsencode(os.path.relpath(path, workspace)).decode("utf-8", "backslashreplace")
        for path in found[:_MOST_NAMES]
    )
    return [name[:_LONGEST_NAME] for name in names]


def _changed_in(folder: str, since_ns: int, pending: list[str]) -> list[str]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED and not entry.path.endswith(_SKILLS):
                    pending.append(entry.path)
            elif entry.stat(follow_symlinks=False).st_ctime_ns >= since_ns:
                found.append(entry.path)
    return found
