"""What holds for a container, in words for people: read from its inspection."""

from typing import Any

from mcp_sandbox.backends.docker.machine import SHARED_KERNEL, is_gvisor, processors
from mcp_sandbox.models import SandboxFacts

_MIB = 1024 * 1024
_NETWORK = {
    "none": "none: loopback only",
    "open": (
        "open: the internet, private networks that the host reaches, and services of the host "
        "that listen on all interfaces; not other sandboxes"
    ),
}


def facts_of(image: str, inspected: dict[str, Any], info: dict[str, Any]) -> SandboxFacts:
    """The facts of a container of the image called `image`, on the engine that `info` describes."""
    host_config = inspected["HostConfig"]
    network = "none" if host_config["NetworkMode"] == "none" else "open"
    runtime = host_config.get("Runtime") or "default runtime"
    # Another kernel, such as gVisor's, does its own filtering and takes no profile.
    filtered = ", own seccomp profile" if runtime in SHARED_KERNEL else ", a kernel of its own"
    return SandboxFacts(
        backend="docker",
        image=image,
        isolation=f"container ({runtime}), uid {inspected['Config']['User']}, no capabilities"
        f"{filtered}, read-only root",
        network=_NETWORK[network],
        limits=_limits(host_config, info),
    )


def _limits(host_config: dict[str, Any], info: dict[str, Any]) -> dict[str, str]:
    memory = host_config["Memory"]
    swap = "swap included" if host_config["MemorySwap"] == memory else "swap is not limited"
    cpus = host_config["NanoCpus"] / 1e9
    whole = ", all that the engine has" if cpus == processors(info) else ""
    gvisor = is_gvisor(info, host_config.get("Runtime") or "")
    threads = ", gVisor's own threads among them" if gvisor else ""
    ulimits = {limit["Name"]: limit["Hard"] for limit in host_config["Ulimits"]}
    return {
        "memory": f"{memory // _MIB} MiB, {swap} (cgroup)",
        "cpus": f"{cpus:g} (cgroup){whole}",
        "pids": f"{host_config['PidsLimit']} (cgroup){threads}",
        "shm": f"{host_config['ShmSize'] // _MIB} MiB",
        "tmp": f"{_tmp_size(host_config)}, counted as memory",
        "open_files": f"{ulimits['nofile']} a process",
        "file_size": f"{ulimits['fsize'] // _MIB} MiB a file",
    }


def _tmp_size(host_config: dict[str, Any]) -> str:
    options = host_config["Tmpfs"]["/tmp"].split(",")  # noqa: S108 - inside the sandbox
    size: str = next(option for option in options if option.startswith("size="))
    return size.removeprefix("size=").removesuffix("m") + " MiB"
