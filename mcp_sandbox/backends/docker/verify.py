"""Checks a container against its request, field by field, and its first process in /proc.

Old engines drop fields they do not know, kernels lack controllers, and an operator's defaults may
add to a request; /proc shows what the kernel enforces, whatever the engine reports. The backend
destroys a container that has a problem.
"""

from pathlib import Path
from typing import Any

from mcp_sandbox.backends.host_process import wrong_mounts, wrong_status

# If the kernel does not count swap, the engine drops MemorySwap, but the memory limit holds;
# `facts_of` reports it.
_NOT_COMPARED = {"MemorySwap", "MemoryReservation", "CpuShares", "Mounts"}
_ENGINE_FILLS_EMPTY = {"Runtime", "Dns", "DnsSearch", "DnsOptions"}
_MASKED = {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/sys/firmware"}
_READ_ONLY = {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"}
_CONFIG = ("User", "Entrypoint", "Tty", "OpenStdin", "NetworkDisabled", "Hostname")


def weaker_fields(body: dict[str, Any], inspected: dict[str, Any]) -> list[str]:
    """Return the fields that differ from the request, each with its wanted and actual value."""
    found = inspected.get("HostConfig", {})
    config = inspected.get("Config", {})
    problems = [
        _difference(name, wanted, found.get(name))
        for name, wanted in body["HostConfig"].items()
        if name not in _NOT_COMPARED and not _agrees(name, wanted, found.get(name))
    ]
    problems += [
        _difference(name, body[name], config.get(name))
        for name in _CONFIG
        if _plain(body[name]) != _plain(config.get(name))
    ]
    return problems + _mount_problems(body, inspected) + _path_problems(found)


def _agrees(name: str, wanted: object, found: object) -> bool:
    if name in _ENGINE_FILLS_EMPTY and not wanted:
        return True
    if name == "Ulimits" and isinstance(wanted, list) and isinstance(found, list):
        # The engine adds its own defaults for limits that a request does not name.
        return {repr(_plain(limit)) for limit in wanted} <= {repr(_plain(limit)) for limit in found}
    return _plain(wanted) == _plain(found)


def _plain(value: object) -> object:
    """Return a form in which null, false and empty are the same and lists have no order."""
    if isinstance(value, dict):
        return sorted((name, _plain(part)) for name, part in value.items() if _plain(part)) or None
    if isinstance(value, list):
        return sorted(repr(_plain(part)) for part in value) or None
    return value or None


def _mount_problems(body: dict[str, Any], inspected: dict[str, Any]) -> list[str]:
    wanted = {
        (mount["Type"], mount["Source"], mount["Target"], not mount["ReadOnly"])
        for mount in body["HostConfig"]["Mounts"]
    }
    found = {
        (mount.get("Type"), mount.get("Source"), mount.get("Destination"), mount.get("RW"))
        for mount in inspected.get("Mounts", [])
        if mount.get("Type") != "tmpfs"
    }
    return [] if wanted == found else [_difference("Mounts", sorted(wanted), list(found))]


def _path_problems(host_config: dict[str, Any]) -> list[str]:
    return [
        f"{name} leaves {', '.join(sorted(missing))} open"
        for name, needed in (("MaskedPaths", _MASKED), ("ReadonlyPaths", _READ_ONLY))
        if (missing := needed - set(host_config.get(name) or ()))
    ]


def _difference(name: str, wanted: object, found: object) -> str:
    return f"{name} should be {_short(wanted)} and is {_short(found)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def first_process_problems(inspected: dict[str, Any]) -> list[str]:
    """Return what is weaker than requested; nothing if the process is not visible. Blocks."""
    folder = Path("/proc") / str(inspected["State"]["Pid"])
    try:
        status = (folder / "status").read_text()
        groups = (folder / "cgroup").read_text()
        mounts = (folder / "mountinfo").read_text()
    except OSError:
        return []
    # An engine on another machine gives a number that is here an unrelated process's.
    if inspected["Id"] not in groups:
        return []
    wanted = {mount["Destination"]: not mount["RW"] for mount in inspected["Mounts"]}
    return wrong_status(status, inspected["Config"]["User"]) + wrong_mounts(mounts, wanted)
