"""Which files of the workspace a command created, changed or deleted, within a small budget."""

from __future__ import annotations

import os
import time

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
        self._found: dict[str, tuple[int, int, int]] = {}
        self._since_ns = 0

    def begin(self, workspace: str) -> None:
        """A command begins now. Only folders in which names have changed are read again."""
        self._since_ns, self._found = _now_coarse(), {}
        if self._seen is not None:
            self._look(workspace, _BUDGET_S / 10, begins=True)

    def end(self, workspace: str) -> tuple[list[str] | None, list[int] | None]:
        """At most 20 paths whose data or inode changed since; how many are new, changed, gone.

        None stands for what cannot be known: there was too much to see.
        """
        before, fresh = self._seen, self._found
        self._look(workspace, _BUDGET_S)
        # What was written just before has the time of the tick in which the command began, too.
        found = [path for path, state in self._found.items() if fresh.get(path) != state]
        names, now = _first(found, workspace), self._seen
        if before is None or now is None:
            return names if now or names else None, None
        parts = [path.rpartition("/") for path in found]
        changed = sum(name in before.get(folder, _NONE)[1] for folder, _, name in parts)
        new = sum(len(seen[1] - before.get(path, _NONE)[1]) for path, seen in now.items())
        gone = sum(len(old[1] - now.get(path, _NONE)[1]) for path, old in before.items())
        return names, [new, changed, gone]

    def _look(self, top: str, budget_s: float, *, begins: bool = False) -> None:
        deadline = time.monotonic() + budget_s
        known, seen, pending, unread = self._seen or {}, {}, [top], False
        self._seen, self._found = None, {}
        while pending and time.monotonic() < deadline:
            folder = pending.pop()
            try:
                seen[folder] = self._read(folder, known.get(folder, _NONE), deadline, begins=begins)
                pending += seen[folder][2]
            except OSError:
                # Removed or closed to us meanwhile, or too much to see.
                unread = True
        self._seen = None if pending or unread else seen

    def _read(self, folder: str, known: _Folder, deadline: float, *, begins: bool) -> _Folder:
        stamp, since_ns = os.stat(folder).st_ctime_ns, self._since_ns
        if begins and known[0] == stamp:
            return known
        look = not begins or stamp >= since_ns
        # Another change within the same tick of the clock would leave the same time.
        stamp, files, folders = stamp if stamp < _now_coarse() else -1, set(), []
        with os.scandir(folder) as entries:
            for entry in entries:
                if time.monotonic() > deadline:
                    raise TimeoutError
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED and not entry.path.endswith(_SKILLS):
                        folders.append(entry.path)
                    continue
                files.add(entry.name)
                if look and (state := entry.stat(follow_symlinks=False)).st_ctime_ns >= since_ns:
                    self._found[entry.path] = state.st_ctime_ns, state.st_size, state.st_ino
        return stamp, files, folders


def _first(paths: list[str], workspace: str) -> list[str]:
    first = sorted(sorted(paths)[:_MOST_SORTED], key=_natural)[:_MOST_NAMES]
    names = (os.fsencode(os.path.relpath(path, workspace)) for path in first)
    return [name.decode("utf-8", "backslashreplace")[:_LONGEST_NAME] for name in names]


def _natural(path: str) -> str:
    from itertools import groupby  # noqa: PLC0415 - a millisecond of each first call

    return "".join("".join(run).zfill(20 * digits) for digits, run in groupby(path, str.isdecimal))
