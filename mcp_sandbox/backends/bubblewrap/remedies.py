"""Why bubblewrap does not work on a machine, and what to do about it. Pure but for `look`."""

from dataclasses import dataclass
from pathlib import Path

_SYSCTL = {
    "apparmor": "kernel/apparmor_restrict_unprivileged_userns",
    "clone": "kernel/unprivileged_userns_clone",
    "most": "user/max_user_namespaces",
}


@dataclass(frozen=True)
class Machine:
    """What decides about user namespaces; None where the kernel has no such setting."""

    apparmor_restricts: bool | None
    userns_clone: bool | None
    most_userns: int | None
    in_container: bool


def look(root: Path = Path("/")) -> Machine:
    """The settings of this machine. Blocks."""
    found = {name: _number(root / "proc/sys" / path) for name, path in _SYSCTL.items()}
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return Machine(
        None if found["apparmor"] is None else found["apparmor"] == 1,
        None if found["clone"] is None else found["clone"] == 1,
        found["most"],
        any(mark.exists() for mark in marks),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def explain(said: str, machine: Machine) -> str:
    """One sentence: the step that failed, in bwrap's own words, and the remedy."""
    said = " ".join(said.split())[-400:] or "it said nothing"
    return f"bubblewrap could not make a sandbox: {said}. {_remedy(said, machine)}"


def _remedy(said: str, machine: Machine) -> str:
    if machine.most_userns == 0:
        return "User namespaces are off: run `sysctl -w user.max_user_namespaces=15000` as root"
    if machine.userns_clone is False:
        return "User namespaces are off: run `sysctl -w kernel.unprivileged_userns_clone=1` as root"
    if _is_refusal(said):
        return _remedy_of_refusal(machine)
    return "Run `mcp-sandbox doctor` for more, or use the docker backend"


def _remedy_of_refusal(machine: Machine) -> str:
    if machine.apparmor_restricts:
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


def _is_refusal(said: str) -> bool:
    signs = ("permission", "not permitted", "namespace", "uid map", "rtm_newaddr", "mount proc")
    return any(sign in said.lower() for sign in signs)
