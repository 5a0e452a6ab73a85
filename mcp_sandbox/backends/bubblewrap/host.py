"""Finds out once what this host offers to bubblewrap sandboxes, for every start."""

import os
from dataclasses import replace
from pathlib import Path

from mcp_sandbox.backends import runner_copy
from mcp_sandbox.backends.bubblewrap import seccomp
from mcp_sandbox.backends.bubblewrap.arguments import Inside, look_at_system
from mcp_sandbox.backends.bubblewrap.cgroups import Cgroups
from mcp_sandbox.backends.bubblewrap.program import find_bwrap, find_python
from mcp_sandbox.backends.bubblewrap.verify import limit_settings, wanted_limits
from mcp_sandbox.backends.runner_copy import beside_pid_1, environment
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.models import OURS, Limits, SandboxFacts, SandboxId, SandboxSpec

_HOME = "/home/sandbox"
_PATH = f"{_HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/opt/bin"
_NETWORK = {
    "none": "none: only its own loopback",
    "open": (
        "open: it shares the host's network, and reaches all that the host reaches, services on "
        "the host's loopback and abstract sockets too"
    ),
}


class Host:
    """What this host offers; sandboxes run as `user`; None: as the server's user, not root.

    Without `walls` a sandbox may do on the host all that this user may.
    """

    def __init__(self, data_root: Path, *, walls: bool = True) -> None:
        """Find out what this host offers. Blocks; the first time it copies the runner.

        Raises BackendUnavailable for a program or filter that is missing, StorageUnavailable.
        """
        self.program, self.python = find_bwrap(), find_python()
        self.uid, self.gid = sandbox_user()
        self.user = self.uid if os.geteuid() == 0 else None
        self.runner = runner_copy.install(data_root, self.python)
        # Python without -I, as only the server sets its environment: see the runner's __main__.
        self.command = (str(self.python), f"{OURS}/{runner_copy.MAIN}")
        self.cgroups = Cgroups.here()
        self.system = look_at_system()
        self.filter = seccomp.program(os.uname().machine) if walls else seccomp.refusing_nothing()
        self.processors = len(os.sched_getaffinity(0))
        self.walls = walls

    def possible(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with at most this host's processors; without walls, its network."""
        limits = replace(spec.limits, cpus=min(spec.limits.cpus, self.processors))
        return replace(spec, limits=limits, network=spec.network if self.walls else "open")

    def resource_limits(self, limits: Limits) -> dict[int, int]:
        return wanted_limits(limits, memory_by_process="memory" not in self.cgroups.controllers)

    def inside(self, spec: SandboxSpec, sandbox_id: SandboxId) -> Inside:
        own = limit_settings(self.resource_limits(spec.limits))
        own["MCP_SANDBOX_IDLE_S"] = f"{spec.idle_s:g}"
        if "pids" in self.cgroups.controllers:
            own["MCP_SANDBOX_PIDS"] = str(spec.limits.pids)
        return Inside(
            uid=self.uid,
            gid=self.gid,
            spec=spec,
            environment=beside_pid_1(environment(spec, _PATH, _HOME)) | own,
            memory_group=self.cgroups.memory_view(sandbox_id),
            walls=self.walls,
        )


def facts(host: Host, spec: SandboxSpec) -> SandboxFacts:
    """Return the facts of a sandbox of that spec on that host."""
    limits = limits_in_words(spec.limits, host.cgroups.controllers, host.processors)
    if not host.walls:
        isolation = f"no isolation: code does on the host what its user {host.uid} may do"
        limits |= {"tmp": "not limited: the host's", "shm": "not limited: the host's"}
        return SandboxFacts("unsafe-local", None, isolation, "open: the host's own network", limits)
    own = "process, mount, ipc" if spec.network == "open" else "process, mount, network, ipc"
    isolation = (
        f"{host.program.version}: own user, {own} and host name namespaces, uid {host.uid} without "
        "capabilities, system call filter, read-only root; shared kernel"
    )
    return SandboxFacts("bubblewrap", None, isolation, _NETWORK[spec.network], limits)


def limits_in_words(limits: Limits, controllers: frozenset[str], processors: int) -> dict[str, str]:
    """Return what is enforced of each limit, by its name."""
    nothing = "not limited: no writable cgroup"
    whole = ", all that this machine gives" if limits.cpus == processors else ""
    memory = f"{limits.memory_mb} MiB"
    return {
        "memory": f"{memory} with swap (cgroup)"
        if "memory" in controllers
        else f"{memory} of data for each process, no limit for all (rlimit): no writable cgroup",
        "cpus": f"{limits.cpus:g} (cgroup){whole}" if "cpu" in controllers else nothing,
        "pids": f"{limits.pids} (cgroup)" if "pids" in controllers else nothing,
        "tmp": f"{limits.tmp_mb} MiB (tmpfs)",
        "shm": f"{limits.shm_mb} MiB (tmpfs)",
        "open_files": f"{limits.open_files} for each process (rlimit)",
        "file_size": f"{limits.file_mb} MiB for each file (rlimit)",
    }
