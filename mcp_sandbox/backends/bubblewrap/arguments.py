"""The arguments of bwrap: a pure function of what the sandbox shall hold.

Nothing of the host is inside but /usr (read-only), the few directories named here, and the mounts
of the spec. Order matters: what comes later lies over what came before.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.models import Limits, Mount, Network

# What Docker masks too, as far as a user without capabilities could read it.
_MASKED = ("keys", "interrupts", "latency_stats", "timer_list", "sched_debug")
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True)
class System:
    """What of the host's system is shown: `links` as they are there, `bound` read-only.

    `masked` are files of /proc that are shown empty.
    """

    links: Mapping[str, str]
    bound: tuple[str, ...]
    masked: tuple[str, ...]


@dataclass(frozen=True)
class Descriptors:
    """Numbers of the open files that bwrap reads and writes."""

    seccomp: int
    status: int
    block: int
    starter: int
    etc: Mapping[str, int]


@dataclass(frozen=True)
class Inside:
    """What one sandbox holds. `reach` names a directory of the host by the path to bind it from."""

    uid: int
    gid: int
    network: Network
    limits: Limits
    mounts: tuple[Mount, ...]
    environment: Mapping[str, str]
    memory_group: tuple[str, str] | None = None


def look_at_system(root: Path = Path("/")) -> System:
    """What the host's root directory looks like. Blocks."""
    links, bound = {}, ["/usr"]
    for name in _LINKED:
        path = root / name
        if path.is_symlink():
            links[f"/{name}"] = str(path.readlink())
        elif path.is_dir():
            bound.append(f"/{name}")
    masked = [name for name in _MASKED if _is_public(root / "proc" / name)]
    return System(links, tuple(bound), tuple(f"/proc/{name}" for name in masked))


def _is_public(path: Path) -> bool:
    return path.exists() and bool(path.stat().st_mode & stat.S_IROTH)


def arguments(
    inside: Inside,
    system: System,
    etc_bound: tuple[str, ...],
    descriptors: Descriptors,
    reach: Mapping[str, str],
) -> list[str]:
    """All options of bwrap; the command is not among them."""
    return [
        *_walls(inside),
        *_system(system),
        *_etc(etc_bound, descriptors),
        *_memory(inside.limits),
        *_ours(inside, reach),
        *("--remount-ro", "/", "--chdir", "/workspace"),
        *("--seccomp", str(descriptors.seccomp)),
        *("--json-status-fd", str(descriptors.status), "--block-fd", str(descriptors.block)),
        *(word for pair in inside.environment.items() for word in ("--setenv", *pair)),
        *("--setenv", "MCP_SANDBOX_STARTER", str(descriptors.starter)),
    ]


def _walls(inside: Inside) -> list[str]:
    # No --die-with-parent: a sandbox may serve several servers and ends itself when idle.
    return [
        *("--unshare-all", "--unshare-user", "--unshare-cgroup"),
        *(("--share-net",) if inside.network == "open" else ()),
        *("--disable-userns", "--assert-userns-disabled"),
        *("--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"),
        *("--uid", str(inside.uid), "--gid", str(inside.gid), "--hostname", "sandbox"),
    ]


def _system(system: System) -> list[str]:
    return [
        *(word for path in system.bound for word in ("--ro-bind", path, path)),
        *(word for path, to in system.links.items() for word in ("--symlink", to, path)),
        # Last on PATH: some distributions have no other `python`.
        *("--symlink", "/usr/bin/python3", "/opt/bin/python"),
        # Some settings of its own namespaces would be the sandbox's to change. The kernel shows
        # whoever looks their own, also through the host's directory.
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
        *(word for path in system.masked for word in ("--ro-bind", "/dev/null", path)),
    ]


def _etc(bound: tuple[str, ...], descriptors: Descriptors) -> list[str]:
    return [
        *(
            word
            for path, number in descriptors.etc.items()
            for word in ("--perms", "0444", "--file", str(number), path)
        ),
        *(word for path in bound for word in ("--ro-bind", path, path)),
    ]


def _memory(limits: Limits) -> list[str]:
    return [
        *("--dev", "/dev", *_tmpfs("/dev/shm", limits.shm_mb), "--remount-ro", "/dev"),  # noqa: S108
        *(*_tmpfs("/tmp", limits.tmp_mb), "--dir", "/var", "--symlink", "/tmp", "/var/tmp"),  # noqa: S108
    ]


def _tmpfs(path: str, size_mb: int) -> tuple[str, ...]:
    return ("--perms", "1777", "--size", str(size_mb << 20), "--tmpfs", path)


def _ours(inside: Inside, reach: Mapping[str, str]) -> list[str]:
    found = ["--ro-bind", reach["runner"], "/opt/mcp-sandbox"]
    found += ["--bind", reach["sockets"], "/run/mcp-sandbox"]
    if inside.memory_group is not None:
        # The runner looks here whether the memory limit ended a process.
        found += ["--ro-bind", *inside.memory_group]
    order = sorted(enumerate(inside.mounts), key=lambda each: each[1].target.count("/"))
    for number, mount in order:
        kind = "--ro-bind" if mount.read_only else "--bind"
        found += [kind, reach[f"mount-{number}"], mount.target]
    return found


def sources(inside: Inside, runner: Path, sockets: Path) -> dict[str, Path]:
    """The host's directories that `arguments` wants reachable, by the names it uses."""
    named = {f"mount-{number}": mount.source for number, mount in enumerate(inside.mounts)}
    return {"runner": runner, "sockets": sockets} | named
