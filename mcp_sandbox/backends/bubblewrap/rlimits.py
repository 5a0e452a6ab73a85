"""Resource limits of a sandbox: set by its first process itself, read back from outside.

The first process is a shell line that lowers its limits and becomes the runner; nothing of the
user runs before. From outside they could be set only with a capability that root may lack.
"""

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcp_sandbox.models import Limits

_OOM_SCORE = 500
_MEMLOCK_KB = 64
_KB = 1024

# The shell's letter, how many bytes one unit of it is, and the name in /proc/PID/limits.
_KINDS = {
    resource.RLIMIT_CORE: ("c", 512, "Max core file size"),
    resource.RLIMIT_MEMLOCK: ("l", _KB, "Max locked memory"),
    resource.RLIMIT_NOFILE: ("n", 1, "Max open files"),
    resource.RLIMIT_FSIZE: ("f", 512, "Max file size"),
    resource.RLIMIT_DATA: ("d", _KB, "Max data size"),
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


def under(values: Mapping[int, int], command: Sequence[str]) -> tuple[str, ...]:
    """The command that lowers its limits and becomes `command`."""
    lines = [
        f"ulimit -{_KINDS[kind][0]} {value // _KINDS[kind][1]}" for kind, value in values.items()
    ]
    lines += [f"echo {_oom_score()} > /proc/self/oom_score_adj", 'exec "$@"']
    return ("/bin/sh", "-c", " && ".join(lines), "sh", *command)


def _oom_score() -> int:
    """Our own when it is higher: lowering it needs a capability."""
    return max(_OOM_SCORE, int(Path("/proc/self/oom_score_adj").read_text()))


def missing(text: str, values: Mapping[int, int]) -> list[str]:
    """What a /proc/PID/limits shows that is not as wanted."""
    found = []
    for kind, value in values.items():
        name = _KINDS[kind][2]
        line = next((line for line in text.splitlines() if line.startswith(name)), "")
        shown = line.removeprefix(name).split()[:2]
        if shown != [str(value)] * 2:
            found.append(
                f"{name.lower()} is {' and '.join(shown) or 'not shown'} instead of {value}"
            )
    return found
