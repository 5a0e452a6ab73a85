"""What a sandbox's container looks like: a pure function from spec to Engine API body.

Every field is sent, because defaults differ between engines and versions.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcp_sandbox.backends.docker.seccomp import profile_text
from mcp_sandbox.backends.runner_environment import beside_pid_1, environment
from mcp_sandbox.models import Limits, Mount, SandboxId, SandboxSpec

APP = "mcp-sandbox"
INSTANCE_LABEL = "mcp-sandbox.instance"
LABEL_PREFIX = "mcp-sandbox.label."
RUNNER_LABEL = "mcp-sandbox.runner"
PYTHON = "/usr/bin/python3"
ROOT = "/opt/mcp-sandbox"
RUNNER = f"{ROOT}/mcp_sandbox/runner/__main__.py"
RELAY = f"{ROOT}/mcp_sandbox/relay.py"
SOCKET_DIRECTORY = "/run/mcp-sandbox"
SOCKET = f"{SOCKET_DIRECTORY}/runner.sock"
HOME = "/home/sandbox"
PATH = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
MIB = 1024 * 1024
# The group of processes counts gVisor's own threads on the host too, several for each one inside.
GVISOR_THREADS = 4096


@dataclass(frozen=True)
class Placement:
    """What the backend decides for one container, beside the spec.

    `image` is the image's content address. `token` is in hex. `socket_directory` is None where
    a socket made inside is not visible outside. With `token_file` the token lies in it, and pid 1
    is an ordinary Python (see the runner's __main__). `network` is "none" or a network's name.
    `processors` is how many the engine has, if it is known: it refuses a limit above that.
    """

    name: SandboxId
    image: str
    instance: str
    token: str
    user: str
    socket_directory: Path | None
    token_file: bool = False
    network: str = "none"
    runtime: str = ""
    apparmor: bool = False
    gvisor: bool = False
    processors: int | None = None


def instance_of(data_root: Path) -> str:
    """The label value that tells the containers of one data root from others."""
    return hashlib.sha256(str(data_root).encode()).hexdigest()[:16]


def container_body(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    """The request that makes the container."""
    return {
        "Image": place.image,
        "User": place.user,
        "WorkingDir": "/workspace",
        "Env": _environment(spec, place),
        # Not by PATH: that leads through a home directory which user code can write to.
        "Entrypoint": [PYTHON, RUNNER] if place.token_file else [PYTHON, "-I", "-S", RUNNER],
        "Cmd": [],
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "Hostname": "sandbox",
        "Domainname": "",
        "StopSignal": "SIGKILL",
        "StopTimeout": 1,
        # A second fence; with it gVisor would find its loopback interface down.
        "NetworkDisabled": place.network == "none" and not place.gvisor,
        "Labels": _labels(spec, place),
        "HostConfig": _host_config(spec, place),
    }


def _environment(spec: SandboxSpec, place: Placement) -> list[str]:
    usual = environment(spec, PATH, HOME)
    if place.token_file:
        secret = {"MCP_SANDBOX_TOKEN_FILE": f"{SOCKET_DIRECTORY}/token"}
        usual = beside_pid_1(usual)
    else:
        secret = {"MCP_SANDBOX_TOKEN": place.token}
    values = {
        **usual,
        **secret,
        "MCP_SANDBOX_SOCKET": SOCKET,
        "MCP_SANDBOX_IDLE_S": f"{spec.idle_s:g}",
        "MCP_SANDBOX_WORKSPACE": "/workspace",
        "MCP_SANDBOX_HOME": HOME,
    }
    return [f"{name}={value}" for name, value in values.items()]


def _labels(spec: SandboxSpec, place: Placement) -> dict[str, str]:
    own = {LABEL_PREFIX + name: value for name, value in spec.labels.items()}
    return {**own, "app": APP, INSTANCE_LABEL: place.instance}


def _host_config(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    return {
        **_privileges(place),
        **_namespaces(place),
        **_filesystem(spec, place),
        **_resources(_possible(spec.limits, place)),
        # A sandbox whose servers were all killed ends by itself, and must leave nothing.
        "AutoRemove": True,
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        # What a container prints is nobody's to keep; a log file would fill the disk.
        "LogConfig": {"Type": "none", "Config": {}},
        "Runtime": place.runtime,
    }


def _privileges(place: Placement) -> dict[str, Any]:
    options = ["no-new-privileges:true", f"seccomp={profile_text()}"]
    return {
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "SecurityOpt": [*options, "apparmor=docker-default"] if place.apparmor else options,
        "GroupAdd": [],
        "Devices": [],
        "DeviceRequests": [],
        "DeviceCgroupRules": [],
        "Sysctls": {},
        # MaskedPaths and ReadonlyPaths are left to the engine: a list of ours, even an empty
        # one, would replace a newer engine's better one.
    }


def _namespaces(place: Placement) -> dict[str, Any]:
    return {
        "NetworkMode": place.network,
        "PidMode": "",
        "IpcMode": "private",
        "UTSMode": "",
        "UsernsMode": "",
        "CgroupnsMode": "private",
        "CgroupParent": "",
        "PublishAllPorts": False,
        "PortBindings": {},
        "ExtraHosts": [],
        "Dns": [],
        "DnsSearch": [],
        "DnsOptions": [],
        "Links": [],
    }


def _filesystem(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    mounts = [_bind(mount) for mount in spec.mounts]
    if place.socket_directory:
        mounts.append(_bind(Mount(place.socket_directory, SOCKET_DIRECTORY)))
    tmpfs = {"/tmp": _tmpfs(spec.limits.tmp_mb, "64k", "1777")}  # noqa: S108 - inside the sandbox
    if not place.socket_directory:
        user, _, group = place.user.partition(":")
        tmpfs[SOCKET_DIRECTORY] = f"{_tmpfs(1, '16', '0700')},uid={user},gid={group}"
    return {
        "ReadonlyRootfs": True,
        "Binds": [],
        "VolumesFrom": [],
        "Mounts": mounts,
        "Tmpfs": tmpfs,
        "ShmSize": spec.limits.shm_mb * MIB,
    }


def _tmpfs(size_mb: int, inodes: str, mode: str) -> str:
    return f"rw,exec,nosuid,nodev,size={size_mb}m,nr_inodes={inodes},mode={mode}"


def _bind(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": str(mount.source),
        "Target": mount.target,
        "ReadOnly": mount.read_only,
        "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
    }


def _possible(limits: Limits, place: Placement) -> Limits:
    return replace(
        limits,
        cpus=min(limits.cpus, place.processors or limits.cpus),
        pids=limits.pids + (GVISOR_THREADS if place.gvisor else 0),
    )


def _resources(limits: Limits) -> dict[str, Any]:
    memory = limits.memory_mb * MIB
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "MemoryReservation": memory // 2,
        "OomKillDisable": False,
        "OomScoreAdj": 500,
        "NanoCpus": round(limits.cpus * 1_000_000_000),
        "CpuShares": 256,
        "PidsLimit": limits.pids,
        # Not nproc: it counts per uid over all containers that share the uid.
        "Ulimits": [
            _ulimit("nofile", limits.open_files),
            _ulimit("core", 0),
            _ulimit("fsize", limits.file_mb * MIB),
            _ulimit("memlock", 64 * 1024),
        ],
    }


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}
