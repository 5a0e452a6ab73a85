"""Looks at the host: processor, kernel, disk, user namespaces, control groups. Reads only."""

import os
import platform
import shutil
from pathlib import Path

from mcp_sandbox.config import Config
from mcp_sandbox.doctor.report import Check, Status

_AREA = "machine"
_GIB = 1 << 30
_MACHINES = ("x86_64", "aarch64")
_CGROUPS = Path("/sys/fs/cgroup")


def examine_machine(config: Config) -> list[Check]:
    """Return the checks of everything that no backend is asked about."""
    return [
        _kernel(),
        _disk(config),
        _user_namespaces(),
        _control_groups(),
        _system_call_filter(),
    ]


def _kernel() -> Check:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return Check(_AREA, "kernel", "fail", found, "sandboxes need Linux: use a Linux machine")
    if platform.machine() not in _MACHINES:
        remedy = f"tried on {' and '.join(_MACHINES)} only: run the test suite before relying on it"
        return Check(_AREA, "kernel", "warn", found, remedy)
    return Check(_AREA, "kernel", "ok", found)


def _disk(config: Config) -> Check:
    folder = config.data_dir
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free at {config.data_dir}"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"make {folder} writable for this user, or set data_dir"
        return Check(_AREA, "data directory", "fail", f"{folder} cannot be written", remedy)
    if usage.free < config.workspace.min_free:
        remedy = "free some space, set data_dir to another disk, or lower workspace.min_free"
        return Check(_AREA, "data directory", "fail", found, remedy)
    status: Status = "warn" if usage.free < config.workspace.size_limit else "ok"
    remedy = "one chat may fill it: lower workspace.size_limit" if status == "warn" else ""
    return Check(_AREA, "data directory", status, found, remedy)


def _user_namespaces() -> Check:
    name = "user namespaces"
    if os.geteuid() == 0:
        return Check(_AREA, name, "ok", "made by root, which needs no permission")
    switches = (
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
        (
            "kernel/unprivileged_userns_clone",
            "0",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "give bwrap an AppArmor profile with `userns,`, or run: "
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    )
    for path, closed, remedy in switches:
        value = _line(Path("/proc/sys") / path)
        if value == closed:
            return Check(_AREA, name, "warn", f"{path.replace('/', '.')} = {value}", remedy)
    return Check(_AREA, name, "ok", "allowed")


def _control_groups() -> Check:
    name = "control groups"
    controllers = _line(_CGROUPS / "cgroup.controllers")
    if controllers is not None:
        return Check(_AREA, name, "ok", f"v2 with {controllers or 'no controllers'}")
    found = [part for part in ("memory", "pids", "cpu") if (_CGROUPS / part).is_dir()]
    if len(found) < 3:
        remedy = "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"
        return Check(_AREA, name, "warn", f"v1 with {', '.join(found) or 'nothing'}", remedy)
    return Check(_AREA, name, "ok", f"v1 with {', '.join(found)}")


def _system_call_filter() -> Check:
    actions = _line(Path("/proc/sys/kernel/seccomp/actions_avail"))
    if actions is None or "errno" not in actions.split():
        remedy = "use a kernel built with CONFIG_SECCOMP_FILTER; sandboxes are refused without"
        return Check(_AREA, "seccomp", "fail", "the kernel has no system call filter", remedy)
    return Check(_AREA, "seccomp", "ok", "the kernel filters system calls")


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
