"""Makes bwrap's arguments and a sandbox's /etc, without the host's users, keys and credentials.

A sandbox sees of the host /usr (read-only), what this file names, and the mounts of the spec;
without walls, everything. Order matters: a later mount covers an earlier one.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath

from mcp_sandbox.backends.runner_copy import GITCONFIG, name_user
from mcp_sandbox.models import OURS, Limits, Network, SandboxSpec

# Mounted apart: the host's /proc shows processes outside the sandbox, and /dev holds devices.
_OWN = ("/proc", "/dev")
TMP = "/tmp"  # noqa: S108 - the host's
# Docker masks these too; here, those that a user without capabilities could read.
_MASKED = ("keys", "interrupts", "latency_stats", "timer_list", "sched_debug")
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MOST_BYTES = 4 * 1024 * 1024
_COPIED = (
    *("ld.so.cache", "localtime", "mime.types", "protocols", "services"),
    *("ssl/openssl.cnf", "debian_version", "os-release", "shells"),
)
# Without certificates programs say so, even where it is the network that is missing.
_BOUND = ("alternatives", "fonts", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
# Each is a mount, and bwrap takes at most 9,000 words.
_MOST_SHOWN = 200
# What programs look for without a link in /usr.
_SETTINGS = ("ImageMagick-6", "ImageMagick-7", "ghostscript", "perl", "php", "xml")


def show_host_root(targets: Collection[str], tmp: str, root: Path = Path("/")) -> list[str]:
    """Return options that show the host, its /tmp from `tmp`, but not `targets`. Blocks."""
    own = ("--proc", "/proc", "--dev-bind", "/dev", "/dev")
    return [*own, *_entries(root, targets, {TMP: tmp})]


def _entries(folder: Path, targets: Collection[str], reach: dict[str, str]) -> list[str]:
    words: list[str] = []
    # A folder that the server cannot list cannot be listed inside either.
    for path in sorted(folder.iterdir()) if os.access(folder, os.R_OK) else ():
        name = str(path)
        below = [target for target in targets if target.startswith(name + "/")]
        if name in (*_OWN, *targets) or (below and (path.is_symlink() or not path.is_dir())):
            continue
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]  # noqa: PTH115 - as it is written
        elif all(map(_is_folder_without_links, below)):
            # It may be gone by then: /run changes all the time.
            words += ["--bind-try", reach.get(name, name), name]
        else:
            words += ["--dir", name, *_entries(path, targets, reach)]
    return words


def _is_folder_without_links(target: str) -> bool:
    return os.path.isdir(target) and os.path.realpath(target) == target  # noqa: PTH112


@dataclass(frozen=True)
class HostSystem:
    """Paths of the host in a sandbox: `links` as they are, `bound` read-only, `masked` empty."""

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
class SandboxLayout:
    """The content of one sandbox; without `walls` it has all of the host too."""

    uid: int
    gid: int
    spec: SandboxSpec
    environment: Mapping[str, str]
    memory_group: tuple[str, str] | None = None
    walls: bool = True


def look_at_system(root: Path = Path("/")) -> HostSystem:
    """Return which parts of the host's system are shown. Blocks."""
    links, bound = {}, ["/usr"]
    for name in _LINKED:
        path = root / name
        if path.is_symlink():
            links[f"/{name}"] = str(path.readlink())
        elif path.is_dir():
            bound.append(f"/{name}")
    masked = [name for name in _MASKED if _is_public(root / "proc" / name)]
    return HostSystem(links, tuple(bound), tuple(f"/proc/{name}" for name in masked))


def _is_public(path: Path) -> bool:
    return path.exists() and bool(path.stat().st_mode & stat.S_IROTH)


def arguments(
    inside: SandboxLayout,
    system: HostSystem,
    etc_bound: tuple[str, ...],
    descriptors: Descriptors,
    reach: Mapping[str, str],
) -> list[str]:
    """Return bwrap's options; `reach` has the path from which to bind each of `list_sources`."""
    ours = _ours(inside, reach)
    shown = _shown(system, etc_bound, descriptors, inside.spec.limits)
    return [
        *(_walls(inside) if inside.walls else ("--unshare-user", "--unshare-pid")),
        *("--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"),
        *("--uid", str(inside.uid), "--gid", str(inside.gid)),
        *(shown if inside.walls else show_host_root(ours[2::3], reach["tmp"])),
        *ours,
        *("--remount-ro", "/", "--chdir", "/workspace"),
        *("--seccomp", str(descriptors.seccomp)),
        *("--json-status-fd", str(descriptors.status), "--block-fd", str(descriptors.block)),
        *(word for pair in inside.environment.items() for word in ("--setenv", *pair)),
        *("--setenv", "MCP_SANDBOX_STARTER", str(descriptors.starter)),
    ]


def _walls(inside: SandboxLayout) -> list[str]:
    # No --die-with-parent: a sandbox may serve several servers and ends when idle.
    return [
        *("--unshare-all", "--unshare-user", "--unshare-cgroup"),
        *(("--share-net",) if inside.spec.network == "open" else ()),
        *("--disable-userns", "--assert-userns-disabled"),
        *("--hostname", "sandbox"),
    ]


def _shown(
    system: HostSystem, etc_bound: tuple[str, ...], descriptors: Descriptors, limits: Limits
) -> list[str]:
    return [
        *(word for path in system.bound for word in ("--ro-bind", path, path)),
        *(word for path, to in system.links.items() for word in ("--symlink", to, path)),
        # Last on PATH, because some distributions have no `python`.
        *("--symlink", "/usr/bin/python3", "/opt/bin/python"),
        # Read-only: else it could change settings of its own namespaces. The host's directory
        # shows each process the settings of its own namespaces.
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
        *(word for path in system.masked for word in ("--ro-bind", "/dev/null", path)),
        *(
            word
            for path, number in descriptors.etc.items()
            for word in ("--perms", "0444", "--file", str(number), path)
        ),
        *(word for path in etc_bound for word in ("--ro-bind-try", path, path)),
        *("--dev", "/dev", *_tmpfs("/dev/shm", limits.shm_mb), "--remount-ro", "/dev"),  # noqa: S108
        *(*_tmpfs("/tmp", limits.tmp_mb), "--dir", "/var", "--symlink", "/tmp", "/var/tmp"),  # noqa: S108
    ]


def _tmpfs(path: str, size_mb: int) -> tuple[str, ...]:
    return ("--perms", "1777", "--size", str(size_mb << 20), "--tmpfs", path)


def _ours(inside: SandboxLayout, reach: Mapping[str, str]) -> list[str]:
    found = ["--ro-bind", reach["runner"], OURS]
    if inside.memory_group is not None:
        # The runner reads here whether the memory limit ended a process.
        found += ["--ro-bind", *inside.memory_group]
    order = sorted(enumerate(inside.spec.mounts), key=lambda each: each[1].target.count("/"))
    for number, mount in order:
        kind = "--ro-bind" if mount.read_only else "--bind"
        found += [kind, reach[f"mount-{number}"], mount.target]
    return found


def list_sources(inside: SandboxLayout, runner: Path) -> dict[str, Path]:
    """Return the host's directories that `arguments` needs, by the names it uses."""
    named = {f"mount-{number}": mount.source for number, mount in enumerate(inside.spec.mounts)}
    # If bwrap is started as another user, the host's /tmp is hidden from it.
    hidden = {} if inside.walls else {"tmp": Path(TMP).resolve()}
    return {"runner": runner} | named | hidden


@dataclass(frozen=True)
class Etc:
    """Content of /etc: new `files` with their bytes; `bound` host directories, read-only."""

    files: dict[str, bytes]
    bound: tuple[str, ...]


def make_etc(uid: int, gid: int, network: Network, host: Path = Path("/etc")) -> Etc:
    """Return the content of /etc for a user of that number. Blocks on the disk."""
    copied = (*_COPIED, "resolv.conf") if network == "open" else _COPIED
    text = {
        **name_user(uid, gid),
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    found = {name: content.encode() for name, content in text.items()} | {"gitconfig": GITCONFIG}
    found |= {name: data for name in copied if (data := _read_public_file(host / name)) is not None}
    # The variables of the host's users are not for a sandbox, nor the servers of its network.
    taken = {name.split("/")[0] for name in (*found, *_BOUND, "environment", "resolv.conf")}
    settings = _find_settings(host, host.stat().st_mtime_ns)
    bound = [name for name in _BOUND if _is_open_to_all(host, name)]
    bound += [name for name in settings if name.split("/")[0] not in taken]
    files = {f"/etc/{name}": data for name, data in found.items()}
    return Etc(files, tuple(f"/etc/{name}" for name in bound))


def _is_open_to_all(host: Path, name: str) -> bool:
    with suppress(OSError):
        entered = [host / each for each in (PurePath(name), *PurePath(name).parents)]
        return entered[0].is_dir() and all(each.stat().st_mode & 0o1 for each in entered)
    return False


@lru_cache(maxsize=1)
def _find_settings(host: Path, _changed_ns: int) -> tuple[str, ...]:
    """Return the paths below the host's /etc of settings that everybody there may read."""
    linked = _find_linked(str(host.parent / "usr"), f"{host}/")
    tops = [host / name for name in sorted({*_SETTINGS, *linked})]
    shown = [path for top in tops if not top.is_symlink() for path in _list_public(top)]
    return tuple(str(path.relative_to(host)) for path in shown[:_MOST_SHOWN])


def _find_linked(folder: str, etc: str, depth: int = 4) -> Iterator[str]:
    """Yield the names in `etc` to which links below a folder lead."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                target = os.path.normpath(Path(folder, Path(entry.path).readlink()))
                if target.startswith(etc):
                    yield target.removeprefix(etc).split("/")[0]
            elif depth and entry.name != "doc" and entry.is_dir():
                yield from _find_linked(entry.path, etc, depth - 1)


def _list_public(path: Path) -> list[Path]:
    """Return the fewest paths that show what everybody may read of a path and below it."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & stat.S_IROTH):
            return [path]
        if not stat.S_ISDIR(mode) or mode & 0o5 != 0o5:
            return []
        below = sorted(path.iterdir())
    except OSError:
        return []
    public = [each for entry in below for each in _list_public(entry)]
    # Alone, a link would be followed out of the folder.
    return [path] if public == below else [each for each in public if not each.is_symlink()]


def _read_public_file(path: Path) -> bytes | None:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or not found.st_mode & stat.S_IROTH:
            return None
        return path.read_bytes() if found.st_size <= _MOST_BYTES else None
    except OSError:
        # A file that the host lacks is absent from its sandboxes too.
        return None
