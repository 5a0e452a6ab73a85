"""Whether the kernel killed something of this sandbox because its memory limit was reached."""

from __future__ import annotations

import os

# cgroup v2 and v1, as a container with a private cgroup namespace sees its own group.
_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class Memory:
    """Counts how often the kernel has killed here."""

    def __init__(self) -> None:
        self._path = next((path for path in _FILES if os.access(path, os.R_OK)), None)

    def kills(self) -> int:
        """How often the kernel has killed for memory so far."""
        if self._path is None:
            return 0
        with open(self._path, "rb") as file:
            counts = [line.split()[1] for line in file if line.startswith(b"oom_kill ")]
        return int(counts[0]) if counts else 0
