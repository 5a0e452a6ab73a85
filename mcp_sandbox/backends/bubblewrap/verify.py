"""Looks at a running sandbox from outside and refuses it when a wall is missing."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mcp_sandbox.backends.bubblewrap import rlimits
from mcp_sandbox.backends.mount_table import wrong_mounts
from mcp_sandbox.errors import InsecureSandbox
from mcp_sandbox.models import Network, SandboxSpec

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


def weaknesses(
    status: str, own: Mapping[str, int], told: Mapping[str, object], network: Network
) -> list[str]:
    """What is weaker than it must be.

    `status` is the text of /proc/PID/status, `own` holds the numbers of the server's namespaces,
    `told` what bwrap said of the sandbox's.
    """
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    wanted = {
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "CapEff": "0" * 16,
        "CapPrm": "0" * 16,
        "CapBnd": "0" * 16,
        "CapAmb": "0" * 16,
    }
    found = ["it runs as root"] if "0" in fields.get("Uid", "0").split() else []
    found += [
        f"{name} is {fields.get(name, 'not shown')!r} instead of {value!r}"
        for name, value in wanted.items()
        if fields.get(name) != value
    ]
    apart = [name for name in _NAMESPACES if name != "net" or network == "none"]
    return found + [
        f"the {name} namespace is the host's"
        for name in apart
        if told.get(f"{name}-namespace") in (None, own[name])
    ]


def own_namespaces() -> dict[str, int]:
    """Numbers of the namespaces of this process. Blocks."""
    return {name: Path(f"/proc/self/ns/{name}").stat().st_ino for name in _NAMESPACES}


def outside_groups(cgroup: str, paths: Iterable[str]) -> list[str]:
    """The groups that a process with this /proc/PID/cgroup is not in, though it should be."""
    inside = [line.split(":", 2)[2] for line in cgroup.splitlines()]
    return [path for path in paths if not any(path.endswith(group) for group in inside)]


def writable_settings(mountinfo: str) -> list[str]:
    """What /proc/PID/mountinfo shows that lets the sandbox change settings of the kernel."""
    found = [line.split(" ") for line in mountinfo.splitlines()]
    options = [fields[5].split(",") for fields in found if fields[4] == "/proc/sys"]
    return [] if options and "ro" in options[-1] else ["/proc/sys is not read-only"]


def check(
    pid: int,
    spec: SandboxSpec,
    told: Mapping[str, object],
    groups: Iterable[str],
    resources: Mapping[int, int],
) -> None:
    """Look at the sandbox whose pid 1 is `pid` on the host. Blocks.

    Raises:
        InsecureSandbox: a wall or a limit is missing.
        FileNotFoundError: the process has ended.
    """
    proc = Path(f"/proc/{pid}")
    found = weaknesses((proc / "status").read_text(), own_namespaces(), told, spec.network)
    mounts = (proc / "mountinfo").read_text()
    found += writable_settings(mounts)
    found += wrong_mounts(mounts, {mount.target: mount.read_only for mount in spec.mounts})
    found += rlimits.missing((proc / "limits").read_text(), resources)
    if groups:
        missing = outside_groups((proc / "cgroup").read_text(), groups)
        found += [f"it is not in the group {path}" for path in missing]
    if found:
        raise InsecureSandbox(
            f"bubblewrap made a weaker sandbox than asked for: {'; '.join(found)}. It was "
            "destroyed; update bubblewrap or use the docker backend"
        )
