"""Whether the kernel killed something of this sandbox because its memory limit was reached."""

from __future__ import annotations

import os

# cgroup v2 and v1, as a container with a private cgroup namespace sees its own group.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class Memory:
    """Counts how often the kernel has killed here."""

    def __init__(self) -> None:
        self._file = next(filter(None, map(_open, _FILES)), None)

    def kills(self) -> int:
        """How often the kernel has killed for memory so far."""
        if self._file is None:
            return 0
        _, _, count = os.pread(self._file, 4096, 0).partition(b"oom_kill ")
        return int(count.split()[0]) if count else 0


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Another version of control groups, or none.
        return None
