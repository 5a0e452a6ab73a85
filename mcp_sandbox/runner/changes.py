"""Which files of the workspace a command created, changed or deleted, within a small budget."""

from __future__ import annotations

import os
import time
from itertools import groupby

# Enough for a project; beyond it looking would cost more than the command.
_CLOCK_REALTIME_COARSE = 5  # Linux's number; Python has no name for it.
_BUDGET_S = 0.05
_MOST_NAMES = 20
# More would take longer to sort than to find.
_MOST_SORTED = 1000
# In JSON a character may take six bytes; all of them go into one message of 64 KiB.
_LONGEST_NAME = 500
_SKIPPED = {".git", ".mcp-sandbox", "node_modules", "__pycache__", ".venv"}
# No command changes them; whoever shares such a file does, by having it.
_SKILLS = "/.claude/skills"
_NEVER = 2**63
# Of a folder: when names in it changed, its files, and its folders by their paths.
_Folder = tuple[int, set[str], list[str]]
_NONE: _Folder = (-1, set(), [])


def _now_coarse() -> int:
    """The clock that stamps files, in ns: the precise one would run ahead of it."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


class Names:
    """The files of the workspace by folder, as one worker saw them last; links are not followed."""

    def __init__(self) -> None:
        # None when there was too much to see.
        self._seen: dict[str, _Folder] | None = {}
        self._found: list[str] = []
        self._since_ns = _NEVER

    def begin(self, workspace: str) -> None:
        """A command begins now. Only folders in which names have changed are read again."""
        if self._seen is not None:
            self._since_ns = _NEVER
            self._look(workspace, _BUDGET_S / 10)
        self._since_ns = _now_coarse()

    def end(self, workspace: str) -> tuple[list[str] | None, list[int] | None]:
        """At most 20 paths whose data or inode changed since; how many are new, changed, gone.

        None stands for what cannot be known: there was too much to see.
        """
        before = self._seen
        self._look(workspace, _BUDGET_S)
        names, now = _first(self._found, workspace), self._seen
        if before is None or now is None:
            return names if now or names else None, None
        parts = [path.rpartition("/") for path in self._found]
        new = sum(name not in before.get(folder, _NONE)[1] for folder, _, name in parts)
        gone = sum(len(old[1] - now.get(path, _NONE)[1]) for path, old in before.items())
        return names, [new, len(parts) - new, gone]

    def _look(self, top: str, budget_s: float) -> None:
        deadline = time.monotonic() + budget_s
        known, seen, pending, unread = self._seen or {}, {}, [top], False
        self._seen, self._found = None, []
        while pending and time.monotonic() < deadline:
            folder = pending.pop()
            try:
                seen[folder] = self._read(folder, known.get(folder, _NONE))
                pending += seen[folder][2]
            except OSError:
                # Removed or closed to us meanwhile.
                unread = True
        self._seen = None if pending or unread else seen

    def _read(self, folder: str, known: _Folder) -> _Folder:
        stamp, since_ns = os.stat(folder).st_ctime_ns, self._since_ns
        if since_ns == _NEVER and known[0] == stamp:
            return known
        # Another change within the same tick of the clock would leave the same time.
        stamp, files, folders = stamp if stamp < _now_coarse() else -1, set(), []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED and not entry.path.endswith(_SKILLS):
                        folders.append(entry.path)
                    continue
                files.add(entry.name)
                if since_ns < _NEVER and entry.stat(follow_symlinks=False).st_ctime_ns >= since_ns:
                    self._found.append(entry.path)
        return stamp, files, folders


def _first(paths: list[str], workspace: str) -> list[str]:
    first = sorted(sorted(paths)[:_MOST_SORTED], key=_natural)[:_MOST_NAMES]
    names = (os.fsencode(os.path.relpath(path, workspace)) for path in first)
    return [name.decode("utf-8", "backslashreplace")[:_LONGEST_NAME] for name in names]


def _natural(path: str) -> str:
    return "".join("".join(run).zfill(20 * digits) for digits, run in groupby(path, str.isdecimal))
