"""What a sandbox's container looks like, and whether it came out that way. Pure.

Every field is sent, because defaults differ between engines and versions. Every field is checked,
because old engines drop those they do not know, kernels lack controllers, and an operator's
defaults may add to a request; /proc shows what the kernel enforces, whatever the engine reports.
The backend destroys a container that has a problem.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcp_sandbox.backends.runner_copy import MAIN, beside_pid_1, environment, list_process_limits
from mcp_sandbox.backends.sandbox_records import find_missing_mounts, find_weak_status
from mcp_sandbox.models import HOME, OURS, Limits, Mount, SandboxId, SandboxSpec

_EPERM = 1
_ENOSYS = 38
_NATIVE = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64", "SCMP_ARCH_RISCV64", "SCMP_ARCH_PPC64LE")
_NEW_NAMESPACES = 0x7E020000
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat
faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl
fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate
futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch ioctl landlock_add_rule landlock_create_ruleset
landlock_restrict_self lchown lgetxattr link linkat listxattr listxattrat llistxattr lremovexattr
lseek lsetxattr lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2
pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
removexattr removexattrat rename renameat renameat2 rmdir sendfile setxattr setxattrat splice stat
statfs statx symlink symlinkat sync sync_file_range sync_file_range2 syncfs tee truncate umask
unlink unlinkat utime utimensat utimes vmsplice write writev
"""
_PROCESSES = """
alarm arch_prctl capget capset execve execveat exit exit_group fork get_robust_list getcpu getegid
geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getresgid getresuid
getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill pause pidfd_open
pidfd_send_signal prctl prlimit64 process_mrelease process_vm_readv process_vm_writev ptrace
restart_syscall riscv_flush_icache rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
seccomp set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid
setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack sysinfo tgkill
times tkill uname vfork wait4 waitid
"""
_MEMORY = """
brk cachestat madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2
mlockall mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free
pkey_mprotect remap_file_pages
"""
_TIME = """
clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time timer_create timer_delete
timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
_WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 futex futex_requeue futex_wait futex_waitv futex_wake getrandom
io_cancel io_destroy io_getevents io_pgetevents io_submit mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 poll ppoll pselect6
select semctl semget semop semtimedop shmat shmctl shmdt shmget signalfd signalfd4
"""
_SOCKETS = """
accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg
sendmmsg sendmsg sendto setsockopt shutdown
"""
APP = "mcp-sandbox"
INSTANCE_LABEL = "mcp-sandbox.instance"
LABEL_PREFIX = "mcp-sandbox.label."
IMAGE_LABEL = "mcp-sandbox.image"
RUNNER_LABEL = "mcp-sandbox.runner"
PYTHON = "/usr/bin/python3"
RUNNER = f"{OURS}/{MAIN}"
SOCKET_DIRECTORY = "/run/mcp-sandbox"
SOCKET = f"{SOCKET_DIRECTORY}/runner.sock"
STARTER = "starter"
PATH = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
MIB = 1024 * 1024
# Fields of the request that are false or empty for every sandbox.
_STREAMS = ("Tty", "OpenStdin", "AttachStdin", "AttachStdout", "AttachStderr")
_NO_NAME = ("PidMode", "UTSMode", "UsernsMode", "CgroupParent")
_NONE = (
    *("CapAdd", "GroupAdd", "Devices", "DeviceRequests", "DeviceCgroupRules", "Binds"),
    *("VolumesFrom", "ExtraHosts", "Dns", "DnsSearch", "DnsOptions", "Links"),
)
# The control group also counts gVisor's threads on the host, several for each process inside.
GVISOR_THREADS = 4096
# If the kernel does not count swap, the engine drops MemorySwap, but the memory limit holds;
# `facts_of` reports it.
_NOT_COMPARED = {"MemorySwap", "MemoryReservation", "CpuShares", "Mounts"}
_ENGINE_FILLS_EMPTY = {"Runtime", "Dns", "DnsSearch", "DnsOptions"}
_MASKED = {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/sys/firmware"}
_READ_ONLY = {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"}
_CONFIG = ("User", "Entrypoint", "Tty", "OpenStdin", "NetworkDisabled", "Hostname")


def profile() -> dict[str, Any]:
    """Return the seccomp profile of a container: the system calls that it may make."""
    allowed = " ".join((_FILES, _PROCESSES, _MEMORY, _TIME, _WAITING, _SOCKETS)).split()
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in _NATIVE],
        "syscalls": [
            {"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"},
            *(_allow("socket", (0, family)) for family in (_AF_UNIX, _AF_INET, _AF_INET6)),
            # For another family the kernel loads modules and makes sockets before it refuses.
            _allow("socketpair", (0, _AF_UNIX)),
            _allow("socket", (0, _AF_NETLINK), (2, _NETLINK_ROUTE)),
            *(_allow("personality", (0, value)) for value in _PERSONALITIES),
            _allow("clone", (0, _NEW_NAMESPACES), op="SCMP_CMP_MASKED_EQ"),
            # A filter cannot read its flags; after "no such call" libc falls back to clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        ],
    }


def _allow(name: str, *arguments: tuple[int, int], op: str = "SCMP_CMP_EQ") -> dict[str, Any]:
    args = [{"index": index, "value": value, "valueTwo": 0, "op": op} for index, value in arguments]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}


@dataclass(frozen=True)
class Placement:
    """What the backend decides for one container, beside the spec.

    `image` is the image's content address. `token` is in hex. In `shown` the runner finds a socket
    of the server; None where it could not connect to that, and gets the token by its environment.
    With `plain` pid 1 is an ordinary Python (see the runner's __main__). `network` is "none" or a
    network's name. `processors` is how many the engine has, if it is known: it refuses a limit
    above that.
    """

    name: SandboxId
    image: str
    instance: str
    user: str
    token: str = ""
    shown: Path | None = None
    plain: bool = False
    network: str = "none"
    runtime: str = ""
    apparmor: bool = False
    gvisor: bool = False
    processors: int | None = None


def instance_of(data_root: Path) -> str:
    """Return the label value that marks the containers of one data root."""
    return hashlib.sha256(str(data_root).encode()).hexdigest()[:16]


def container_body(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    """Return the request that creates the container."""
    return {
        "Image": place.image,
        "User": place.user,
        "WorkingDir": "/workspace",
        "Env": _environment(spec, place),
        # Not by PATH, which has a directory that user code can write to.
        "Entrypoint": [PYTHON, RUNNER] if place.plain else [PYTHON, "-I", "-S", RUNNER],
        "Cmd": [],
        # The engine would run an image's own beside the runner, with the secret in its environment.
        "Healthcheck": {"Test": ["NONE"]},
        **dict.fromkeys(_STREAMS, False),
        "Hostname": "sandbox",
        "Domainname": "",
        "StopSignal": "SIGKILL",
        "StopTimeout": 1,
        # A second barrier, and a quick start; with it gVisor has no loopback and no /etc/hosts.
        "NetworkDisabled": place.network == "none" and place.shown is not None,
        "Labels": {
            **{LABEL_PREFIX + name: value for name, value in spec.labels.items()},
            "app": APP,
            INSTANCE_LABEL: place.instance,
            IMAGE_LABEL: spec.image,
        },
        "HostConfig": _host_config(spec, place),
    }


def _environment(spec: SandboxSpec, place: Placement) -> list[str]:
    usual = environment(spec, PATH)
    start = {"MCP_SANDBOX_STARTER": f"{SOCKET_DIRECTORY}/{STARTER}"}
    secret = {"MCP_SANDBOX_TOKEN": place.token, "MCP_SANDBOX_SOCKET": SOCKET}
    values = {
        **(beside_pid_1(usual) if place.plain else usual),
        **(start if place.shown else secret),
        "MCP_SANDBOX_IDLE_S": f"{spec.idle_s:g}",
        "MCP_SANDBOX_PIDS": str(spec.limits.pids),
        "MCP_SANDBOX_WORKSPACE": "/workspace",
        "MCP_SANDBOX_HOME": HOME,
    }
    return [f"{name}={value}" for name, value in values.items()]


def _host_config(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    options = ["no-new-privileges:true", f"seccomp={json.dumps(profile())}"]
    return {
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": [*options, "apparmor=docker-default"] if place.apparmor else options,
        "Sysctls": {},
        # MaskedPaths and ReadonlyPaths are left to the engine: any list sent here, even an
        # empty one, would replace a newer engine's better one.
        "NetworkMode": place.network,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "PublishAllPorts": False,
        "PortBindings": {},
        **_filesystem(spec, place),
        **_resources(_possible(spec.limits, place), list_process_limits(spec)),
        **dict.fromkeys(_NO_NAME, ""),
        **{name: [] for name in _NONE},
        # A sandbox whose servers were all killed ends when idle, and must leave nothing.
        "AutoRemove": True,
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        # No program reads what a container prints, and a log file would fill the disk.
        "LogConfig": {"Type": "none", "Config": {}},
        "Runtime": place.runtime,
    }


def _filesystem(spec: SandboxSpec, place: Placement) -> dict[str, Any]:
    mounts = [_bind(mount) for mount in spec.mounts]
    if place.shown:
        mounts.append(_bind(Mount(place.shown, SOCKET_DIRECTORY, read_only=True)))
        if place.network == "none":
            mounts += [_bind(Mount(place.shown / "hosts", "/etc/hosts", read_only=True))]
    tmpfs = {"/tmp": _tmpfs(spec.limits.tmp_mb, "64k", "1777")}  # noqa: S108 - inside the sandbox
    if not place.shown:
        user, _, group = place.user.partition(":")
        tmpfs[SOCKET_DIRECTORY] = f"{_tmpfs(1, '16', '0700')},uid={user},gid={group}"
    return {
        "ReadonlyRootfs": True,
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


def _resources(limits: Limits, by_process: Mapping[str, int]) -> dict[str, Any]:
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
        "Ulimits": [
            {"Name": name, "Soft": most, "Hard": most} for name, most in by_process.items()
        ],
    }


def find_weaker_fields(body: dict[str, Any], inspected: dict[str, Any]) -> list[str]:
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
    return find_weak_status(status, inspected["Config"]["User"]) + find_missing_mounts(
        mounts, wanted
    )
