"""Control groups: they limit memory, processes and processor time of bubblewrap sandboxes.

Finds the hierarchies that this process may write (version 1, or version 2 where a part of the tree
is delegated to its user), and keeps one group per sandbox below `mcp-sandbox` in each. The facts of
a sandbox name the limits that cannot be set.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import Limits, SandboxId

_OURS = "mcp-sandbox"
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_REMOVE_LIMIT_S = 2.0
_RETRY_S = 0.002


@dataclass(frozen=True)
class Hierarchy:
    """A directory that holds the sandboxes' groups, its controllers; `unified`: version 2."""

    base: Path
    controllers: frozenset[str]
    unified: bool


def find(mounts: str, own: str, *, root: bool) -> list[Hierarchy]:
    """Return the hierarchies that this process may use.

    `mounts` and `own` are the texts of /proc/self/mountinfo and /proc/self/cgroup.
    """
    found: list[Hierarchy] = []
    wanted = set(_CONTROLLERS)
    for point, kind, options in _mounted(mounts):
        if kind == "cgroup":
            base, offered = point / _OURS, frozenset(wanted & options)
            if offered and _make(base):
                found.append(Hierarchy(base, offered, unified=False))
                wanted -= offered
        elif kind == "cgroup2":
            parent = point if root else _delegated(point, own)
            offered = _enable(parent, wanted) if parent is not None else frozenset[str]()
            if parent is not None and offered:
                found.append(Hierarchy(parent / _OURS, offered, unified=True))
                wanted -= offered
    return found


def _mounted(mounts: str) -> list[tuple[Path, str, frozenset[str]]]:
    """Return mount point, kind and options of every control group mount."""
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2) if after.count(" ") >= 2 else ("", "", "")
        if kind in ("cgroup", "cgroup2"):
            point = before.split(" ")[4].encode().decode("unicode_escape")
            found.append((Path(point), kind, frozenset(options.split(","))))
    return found


def _make(base: Path) -> bool:
    """Make a directory in a hierarchy; return False if this process may not write to it."""
    try:
        base.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(base, os.W_OK)


def _delegated(point: Path, own: str) -> Path | None:
    """Return the topmost group above this process that its user may manage, or None."""
    line = next((line for line in own.splitlines() if line.startswith("0::/")), None)
    group = point / line[4:] if line is not None else point
    best = None
    while group != point and os.access(group / "cgroup.subtree_control", os.W_OK):
        if os.access(group / "cgroup.procs", os.W_OK):
            best = group
        group = group.parent
    return best


def _enable(parent: Path, wanted: set[str]) -> frozenset[str]:
    """Enable controllers for the sandboxes' groups; return those that are enabled."""
    base = parent / _OURS
    if not _make(base):
        return frozenset()
    for level in (parent, base):
        for controller in sorted(wanted & _words(level / "cgroup.controllers")):
            if controller not in _words(level / "cgroup.subtree_control"):
                # Fails if it holds processes or may not pass the controller on; checked below.
                with suppress(OSError):
                    (level / "cgroup.subtree_control").write_text(f"+{controller}")
    return frozenset(wanted & _words(base / "cgroup.subtree_control"))


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


class Cgroups:
    """The groups of this machine's sandboxes. Every call blocks for well under a millisecond."""

    def __init__(self, hierarchies: list[Hierarchy]) -> None:
        self._hierarchies = hierarchies

    @classmethod
    def here(cls) -> "Cgroups":
        """Return the groups that this process may use on this machine."""
        own = Path("/proc/self/cgroup")
        if not own.exists():
            return cls([])
        mounts = Path("/proc/self/mountinfo").read_text()
        return cls(find(mounts, own.read_text(), root=os.geteuid() == 0))

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset().union(*(each.controllers for each in self._hierarchies))

    def paths(self, sandbox_id: SandboxId) -> tuple[str, ...]:
        return tuple(str(each.base / sandbox_id) for each in self._hierarchies)

    def memory_view(self, sandbox_id: SandboxId) -> tuple[str, str] | None:
        """Return the group that counts memory, and where programs in a container expect it."""
        for each in self._hierarchies:
            if "memory" in each.controllers:
                inside = "/sys/fs/cgroup" if each.unified else "/sys/fs/cgroup/memory"
                return str(each.base / sandbox_id), inside
        return None

    def create(self, sandbox_id: SandboxId, limits: Limits) -> None:
        """Make the groups of a sandbox and set their limits.

        Raises BackendUnavailable: the kernel does not take a limit.
        """
        for each in self._hierarchies:
            group = each.base / sandbox_id
            try:
                group.mkdir()
                for name, value in _settings(each, limits).items():
                    (group / name).write_text(value)
            except OSError as exc:
                raise BackendUnavailable(
                    f"the kernel did not take the limits of a sandbox at {group} "
                    f"({exc.strerror}): check the limits in the configuration"
                ) from exc
            if "memory" in each.controllers:
                _bound_swap(group, limits)

    def joinable(self, sandbox_id: SandboxId) -> tuple[str, ...]:
        """Return the groups that a single thread can join: those of version 1."""
        return tuple(str(each.base / sandbox_id) for each in self._hierarchies if not each.unified)

    def add(self, sandbox_id: SandboxId, pid: int, *, joined: tuple[str, ...]) -> None:
        """Put a process into those groups of a sandbox that it was not started in."""
        for path in self.paths(sandbox_id):
            if path not in joined:
                Path(path, "cgroup.procs").write_text(str(pid))


def remove(paths: tuple[str, ...]) -> None:
    """Remove groups without processes; absent is fine. Blocks up to 2 s for each."""
    for path in map(Path, paths):
        deadline = time.monotonic() + _REMOVE_LIMIT_S
        while path.exists() and time.monotonic() < deadline:
            try:
                path.rmdir()
            except OSError:
                # A process that has just ended is still counted for a moment.
                time.sleep(_RETRY_S)


def _settings(hierarchy: Hierarchy, limits: Limits) -> Mapping[str, str]:
    memory, quota = str(limits.memory_mb << 20), str(max(1000, int(limits.cpus * _PERIOD_US)))
    version1 = {
        "memory": {"memory.limit_in_bytes": memory},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
    }
    version2 = {
        "memory": {"memory.max": memory},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
    }
    chosen = version2 if hierarchy.unified else version1
    return {
        name: value
        for controller in hierarchy.controllers
        for name, value in chosen[controller].items()
    }


def _bound_swap(group: Path, limits: Limits) -> None:
    """Count swap into the memory limit, or keep the group off swap."""
    together, apart = group / "memory.memsw.limit_in_bytes", group / "memory.swap.max"
    if together.exists():
        together.write_text(str(limits.memory_mb << 20))
    elif apart.exists():
        apart.write_text("0")
    elif (group / "memory.swappiness").exists():
        (group / "memory.swappiness").write_text("0")
