"""Says in words what holds for a bubblewrap sandbox. Pure."""

from mcp_sandbox.backends.bubblewrap.host import Host
from mcp_sandbox.models import Limits, SandboxFacts, SandboxSpec

_NETWORK = {
    "none": "none: only its own loopback",
    "open": (
        "open: it shares the host's network, and reaches all that the host reaches, services on "
        "the host's loopback and abstract sockets too"
    ),
}


def facts(host: Host, spec: SandboxSpec) -> SandboxFacts:
    """What holds for a sandbox of that spec on that host."""
    return SandboxFacts(
        backend="bubblewrap",
        image=None,
        isolation=(
            f"{host.program.version}: own user, process, mount, network, ipc and host name "
            f"namespaces, uid {host.uid} without capabilities, system call filter, read-only root; "
            "shared kernel"
        ).replace("network, ", "" if spec.network == "open" else "network, "),
        network=_NETWORK[spec.network],
        limits=limits_in_words(spec.limits, host.cgroups.controllers, host.processors),
    )


def limits_in_words(limits: Limits, controllers: frozenset[str], processors: int) -> dict[str, str]:
    """Each limit's name, and what is enforced."""
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
