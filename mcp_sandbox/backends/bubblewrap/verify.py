"""Checks a running sandbox from outside and refuses it if isolation or a limit is missing.

The sandbox's first process sets its own resource limits before any code of the user runs: to set
them from outside needs a capability that root may lack. Here they are read back.
"""

import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.backends.runner_copy import list_process_limits
from mcp_sandbox.backends.sandbox_records import find_missing_mounts, find_weak_status, sandbox_user
from mcp_sandbox.errors import InsecureSandbox
from mcp_sandbox.models import Network, SandboxSpec

_WITHOUT_WALLS = ("mnt", "pid")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
_OOM_SCORE = 500
# The name of each in /proc/PID/limits.
_KINDS = {
    resource.RLIMIT_CORE: "Max core file size",
    resource.RLIMIT_MEMLOCK: "Max locked memory",
    resource.RLIMIT_MSGQUEUE: "Max msgqueue size",
    resource.RLIMIT_NOFILE: "Max open files",
    resource.RLIMIT_FSIZE: "Max file size",
    resource.RLIMIT_DATA: "Max data size",
    resource.RLIMIT_SIGPENDING: "Max pending signals",
}


def find_shared_namespaces(
    own: Mapping[str, int], told: Mapping[str, object], apart: Iterable[str]
) -> list[str]:
    """Return a problem for each namespace of `apart` that the sandbox shares with the host.

    `own` holds the numbers of the server's namespaces, `told` bwrap's report of the sandbox's.
    """
    return [
        f"the {name} namespace is the host's"
        for name in apart
        if told.get(f"{name}-namespace") in (None, own[name])
    ]


@dataclass(frozen=True)
class BwrapStatus:
    """bwrap's own process number, and its report: the sandbox's pid 1 and namespaces."""

    launcher: int
    pid: int
    status: Mapping[str, object]


def namespaces(network: Network, *, walls: bool) -> list[str]:
    """Return the namespaces that a sandbox must not share with the host."""
    kinds = _NAMESPACES if walls else _WITHOUT_WALLS
    return [name for name in kinds if name != "net" or network == "none"]


def find_outside_groups(cgroup: str, paths: Iterable[str]) -> list[str]:
    """Return those groups of `paths` that a process with this /proc/PID/cgroup is not in."""
    inside = [line.split(":", 2)[2] for line in cgroup.splitlines()]
    return [path for path in paths if not any(path.endswith(group) for group in inside)]


def check(
    told: BwrapStatus,
    spec: SandboxSpec,
    groups: Iterable[str],
    limits: Mapping[int, int],
    *,
    walls: bool,
) -> None:
    """Check the sandbox that bwrap reported. Blocks.

    Raises InsecureSandbox for missing isolation or limits, FileNotFoundError if it has ended.
    """
    proc = Path(f"/proc/{told.pid}")
    apart = namespaces(spec.network, walls=walls)
    own = {name: Path(f"/proc/self/ns/{name}").stat().st_ino for name in _NAMESPACES}
    user = ":".join(map(str, sandbox_user(spec)))
    found = find_weak_status((proc / "status").read_text(), user)
    found += find_shared_namespaces(own, told.status, apart)
    mounts = {mount.target: mount.read_only for mount in spec.mounts}
    # Else the sandbox could change settings of the kernel.
    mounts |= {"/proc/sys": True} if walls else {}
    found += find_missing_mounts((proc / "mountinfo").read_text(), mounts)
    found += find_missing_limits((proc / "limits").read_text(), limits)
    if groups:
        missing = find_outside_groups((proc / "cgroup").read_text(), groups)
        found += [f"it is not in the group {path}" for path in missing]
    if found:
        raise InsecureSandbox(
            f"bubblewrap made a weaker sandbox than requested: {'; '.join(found)}. It was "
            "destroyed; update bubblewrap or use the docker backend"
        )


def list_wanted_limits(spec: SandboxSpec, *, memory_by_process: bool) -> dict[int, int]:
    """Return each resource and its limit, in the kernel's units.

    `memory_by_process` limits the data of each process: for machines without a memory group.
    """
    found = list_process_limits(spec)
    if memory_by_process:
        # Data, not address space: node reserves far more addresses than it uses.
        found["data"] = spec.limits.memory_mb << 20
    kinds = {getattr(resource, f"RLIMIT_{name.upper()}"): value for name, value in found.items()}
    return {kind: _possible(kind, value) for kind, value in kinds.items()}


def _possible(kind: int, value: int) -> int:
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def limit_settings(values: Mapping[int, int]) -> dict[str, str]:
    """Return the runner's settings: the limits that it sets for itself and its children."""
    limits = " ".join(f"{kind}:{value}" for kind, value in values.items())
    # The server's own score if it is higher: to lower it needs a capability.
    score = max(_OOM_SCORE, int(Path("/proc/self/oom_score_adj").read_text()))
    return {"MCP_SANDBOX_LIMITS": limits, "MCP_SANDBOX_OOM_SCORE": str(score)}


def find_missing_limits(text: str, values: Mapping[int, int]) -> list[str]:
    """Return the limits in the text of /proc/PID/limits that are not as wanted."""
    found = []
    for kind, value in values.items():
        name = _KINDS[kind]
        line = next((line for line in text.splitlines() if line.startswith(name)), "")
        shown = line.removeprefix(name).split()[:2]
        if shown != [str(value)] * 2:
            is_shown = " and ".join(shown) or "not shown"
            found.append(f"{name.lower()} is {is_shown} instead of {value}")
    return found
