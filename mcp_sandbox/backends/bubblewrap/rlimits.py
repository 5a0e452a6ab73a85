"""Resource limits of a sandbox: set by its first process itself, read back from outside.

The runner lowers its own before anything of the user runs. From outside they could be set only
with a capability that root may lack.
"""

import resource
from collections.abc import Mapping
from pathlib import Path

from mcp_sandbox.models import Limits

_OOM_SCORE = 500
_MEMLOCK_KB = 64
_KB = 1024

# The name of each in /proc/PID/limits.
_KINDS = {
    resource.RLIMIT_CORE: "Max core file size",
    resource.RLIMIT_MEMLOCK: "Max locked memory",
    resource.RLIMIT_NOFILE: "Max open files",
    resource.RLIMIT_FSIZE: "Max file size",
    resource.RLIMIT_DATA: "Max data size",
}


def wanted(limits: Limits, *, memory_by_process: bool) -> dict[int, int]:
    """Each resource and its limit, as the kernel counts it.

    `memory_by_process` limits the data of each process: for machines without a memory group.
    """
    found = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: _MEMLOCK_KB * _KB,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
    }
    if memory_by_process:
        # Data, not address space: node reserves far more addresses than it ever uses.
        found[resource.RLIMIT_DATA] = limits.memory_mb << 20
    return {kind: _possible(kind, value) for kind, value in found.items()}


def _possible(kind: int, value: int) -> int:
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def settings(values: Mapping[int, int]) -> dict[str, str]:
    """What the runner is told: the limits it puts on itself and on all it starts."""
    limits = " ".join(f"{kind}:{value}" for kind, value in values.items())
    return {"MCP_SANDBOX_LIMITS": limits, "MCP_SANDBOX_OOM_SCORE": str(_oom_score())}


def _oom_score() -> int:
    """Our own when it is higher: lowering it needs a capability."""
    return max(_OOM_SCORE, int(Path("/proc/self/oom_score_adj").read_text()))


def missing(text: str, values: Mapping[int, int]) -> list[str]:
    """What a /proc/PID/limits shows that is not as wanted."""
    found = []
    for kind, value in values.items():
        name = _KINDS[kind]
        line = next((line for line in text.splitlines() if line.startswith(name)), "")
        shown = line.removeprefix(name).split()[:2]
        if shown != [str(value)] * 2:
            found.append(
                f"{name.lower()} is {' and '.join(shown) or 'not shown'} instead of {value}"
            )
    return found
