"""What an engine's own account of itself means for sandboxes. Pure functions of its `info`."""

from typing import Any

from mcp_sandbox.backends.docker.engine import Engine
from mcp_sandbox.errors import BackendUnavailable

# Runtimes whose containers share the host's kernel, so that a socket made inside is a socket here.
SHARED_KERNEL = ("", "runc", "crun", "io.containerd.runc.v2")


def refuse_unusable(info: dict[str, Any]) -> None:
    """Refuse an engine that cannot keep what a sandbox needs.

    Raises:
        BackendUnavailable: the message says what is in the way and what to do.
    """
    options = _security_options(info)
    if info.get("OSType") != "linux":
        raise BackendUnavailable("the Docker engine runs Windows containers: switch it to Linux")
    if "seccomp" not in options:
        raise BackendUnavailable(
            "the Docker engine's kernel has no seccomp filters: use a kernel with "
            "CONFIG_SECCOMP_FILTER"
        )
    if "rootless" in options or "userns" in options:
        raise BackendUnavailable(
            "the Docker engine maps user ids (rootless or userns-remap), so the sandbox user could "
            "not use its workspace: use an engine without, or the bubblewrap backend"
        )
    for limit, controller in (("MemoryLimit", "memory"), ("PidsLimit", "pids")):
        # Older engines do not tell of PidsLimit; the inspection of the container does.
        if info.get(limit, True) is False:
            raise BackendUnavailable(
                f"the Docker engine's kernel has no {controller} cgroup: enable it "
                f"(for memory: boot with cgroup_enable=memory)"
            )


def has_apparmor(info: dict[str, Any]) -> bool:
    """Whether the engine can confine containers by AppArmor."""
    return "apparmor" in _security_options(info)


def shares_sockets(engine: Engine, info: dict[str, Any], runtime: str) -> bool:
    """Whether a socket made in a mounted directory can be connected to from here."""
    in_virtual_machine = "Docker Desktop" in str(info.get("OperatingSystem"))
    chosen = runtime or str(info.get("DefaultRuntime", ""))
    return engine.is_local and not in_virtual_machine and chosen in SHARED_KERNEL


def is_gvisor(info: dict[str, Any], runtime: str) -> bool:
    """Whether containers of a runtime ("" is the engine's default) run on gVisor's kernel."""
    chosen = runtime or str(info.get("DefaultRuntime", ""))
    entry = (info.get("Runtimes") or {}).get(chosen) or {}
    program = str(entry.get("path") or entry.get("runtimeType") or "").rpartition("/")[2]
    return any(word in name for name in (chosen, program) for word in ("runsc", "gvisor"))


def processors(info: dict[str, Any]) -> int | None:
    """How many processors the engine can give to a container; None when it does not tell."""
    return int(info.get("NCPU") or 0) or None


def _security_options(info: dict[str, Any]) -> set[str]:
    """Names out of entries such as `name=seccomp,profile=default`."""
    entries = info.get("SecurityOptions") or []
    return {entry.split(",", 1)[0].removeprefix("name=") for entry in entries}
