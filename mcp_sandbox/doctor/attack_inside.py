"""Runs in a sandbox and makes one attempt to break out of it, with the standard library alone.

The host sends this file in as text, and on stdin which attempt to make and where its canaries are.
If the attempt fails, the program prints the evidence; if it succeeds, the program fails with it.
Success does no harm: files are opened and not read, system calls get arguments that mean nothing.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from glob import glob
from types import SimpleNamespace
from typing import Any

SEARCH_S = 3.0
MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
PR_GET_NO_NEW_PRIVS = 39
STATUS, MOUNTS = "/proc/self/status", "/proc/self/mountinfo"
ENVIRONMENTS, COMMANDS, CGROUPS = "/proc/*/environ", "/proc/*/cmdline", "/sys/fs/cgroup/**"
# Folders that are not searched, and those whose files have no values.
KERNEL, READ = ("/proc", "/sys"), ("/usr", "/dev")
# Where a sandbox has mounts, also beneath, and what it must not write to.
OWN = ("/", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/tmp", "/var/tmp")
OURS = ("/opt/mcp-sandbox", "/opt/skills", "/opt/agents")
BENEATH = ("/proc", "/sys", "/dev", "/etc", "/workspace", "/home/sandbox", "/run/mcp", *OURS)
SETTINGS = ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches")
SYSTEM = ("/", "/etc", "/usr/bin", "/usr/lib", "/opt", "/sys", "/var", *OURS, *SETTINGS)
# Name, number on x86-64, number on other machines, arguments. kexec_load has a flag that does not
# exist: without it, what is loaded would be unloaded.
NEW = "user:272:97:0x10000000 mount:272:97:0x20000 network:272:97:0x40000000 pid:272:97:0x20000000"
INSIDES = """keyctl:250:219 add_key:248:217 request_key:249:218 bpf:321:280 userfaultfd:323:282:1
perf_event_open:298:241 io_uring_setup:425:425 io_uring_enter:426:426:-1"""
MOUNTING = """mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 setns:308:268:-1
open_tree:428:428:-100 fsopen:430:430 fsmount:432:432:-1 open_by_handle_at:304:265:-100"""
MACHINE = """init_module:175:105 delete_module:176:106 kexec_load:246:104:0:0:0:0x8000
reboot:169:142 swapon:167:224 clock_settime:227:112 sethostname:170:161:0:-1 syslog:103:116:3"""
SOCKETS = """vsock:41:198:40:1 alg:41:198:38:5 packet:41:198:17:3 key:41:198:15:3:2 tipc:41:198:30:1
xdp:41:198:44:3 raw:41:198:2:3:1 audit:41:198:16:3:9 netfilter:41:198:16:3:12"""


def is_so(held: object, evidence: str) -> str:
    return evidence if held else sys.exit(f"not so: {evidence}")


def nowhere(found: Iterable[str]) -> str:
    return next((sys.exit(f"found: {place}") for place in found), "found nowhere")


def none_of(ways: Iterable[Iterable[Any]]) -> str:
    """Call each function (name, function, arguments); return how all were refused, or fail."""
    passed, refused = list[str](), Counter[str]()
    for name, way, *given in ways:
        try:
            way(*given)
        except (OSError, MemoryError) as exc:
            code = getattr(exc, "errno", None)
            refused[errno.errorcode.get(code or 0, type(exc).__name__)] += 1
        else:
            passed.append(name)
    if passed:
        sys.exit(f"possible: {', '.join(passed[:3])}{' and more' if passed[3:] else ''}")
    return "refused: " + ", ".join(f"{count} x {name}" for name, count in refused.items())


def words(path: str) -> list[list[str]]:
    with open(path) as file:
        return [line.split() for line in file]


def not_in(paths: Iterable[str], needle: str) -> str:
    for path in paths:
        # Opening a pipe that has no writer would block.
        with suppress(OSError), open(os.open(path, os.O_NONBLOCK), "rb") as file:
            if needle.encode() in file.read(MIB):
                sys.exit(f"found: {path}")
    return "found nowhere"


def entries(*without: str) -> Iterator[str]:
    """Yield the paths beneath / but for some folders, the nearest first, for a bounded time."""
    end, folders = time.monotonic() + SEARCH_S, deque("/")
    while folders and time.monotonic() < end:
        with suppress(OSError), os.scandir(folders.popleft()) as found:
            for entry in found:
                yield entry.path
                if entry.is_dir(follow_symlinks=False) and entry.path not in without:
                    folders.append(entry.path)


def calls(table: str) -> str:
    def call(number: str, elsewhere: str, *given: str) -> None:
        number = number if os.uname().machine == "x86_64" else elsewhere
        numbers = [ctypes.c_long(int(each, 0)) for each in (number, *given, *"000000")]
        code = ctypes.get_errno() if LIBC.syscall(*numbers[:7]) == -1 else 0
        # With another error the kernel has looked at the arguments, so the call is allowed.
        if code in (errno.EPERM, errno.ENOSYS):
            raise OSError(code, "closed")

    rows = [row.split(":") for row in table.split()]
    return none_of((name, call, *numbers) for name, *numbers in rows)


def opening(*paths: str, flags: int = os.O_RDONLY) -> str:
    return none_of((path, os.open, path, flags | os.O_NONBLOCK) for path in paths)


def through_links(path: str) -> str:
    os.symlink(path, "link")
    os.symlink(os.path.dirname(path), "folder")
    ways = ["link", f"folder/{os.path.basename(path)}", f"../../../../../..{path}"]
    ways += [f"/proc/{each}{path}" for each in ("self/root", "1/root", "self/cwd/..", "1/cwd/..")]
    opens = [(way, os.open, way, os.O_RDONLY) for way in ways]
    return none_of([("a hard link", os.link, path, "hard"), *opens])


def connected(address: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to HOST:PORT or to a unix socket, of which an abstract one begins with @."""
    host, _, port = address.partition(":")
    client = socket.socket(socket.AF_INET if port else socket.AF_UNIX, kind)
    client.settimeout(2)
    client.connect((host, int(port)) if port else address.replace("@", "\0"))
    return client


def connecting(*addresses: str) -> str:
    return none_of((each, connected, each) for each in addresses)


def door(targets: list[str]) -> str:
    proxy = os.environ.get("HTTPS_PROXY", "").rpartition("/")[2]
    is_so(proxy, "there is a door")

    def ask(target: str) -> None:
        line = connected(proxy)
        line.settimeout(10)
        line.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        if line.recv(64).split()[1:2] != [b"200"]:
            raise PermissionError(errno.EACCES, "refused")

    return none_of((target, ask, target) for target in targets)


def writing(size_mb: int, *folders: str) -> str:
    def write(folder: str) -> None:
        with open(f"{folder}/large-file", "wb") as file:
            os.unlink(file.name)
            file.write(bytes(size_mb * MIB))

    return none_of((f"{size_mb} MiB in {each}", write, each) for each in folders)


def taking(count: int, what: str, take: Callable[[], object]) -> str:
    return none_of([(f"{count} {what}", lambda: [take() for _ in range(count)])])


def outlast(name: str) -> str:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0{name}")
        server.listen()
    time.sleep(30)
    sys.exit("it was not ended")


def end_runner() -> str:
    # Otherwise process 1 may be the machine's own, which must not be killed.
    is_so("mcp-sandbox" in str(words("/proc/1/cmdline")), "the first process is the runner")
    with suppress(OSError):
        os.kill(1, signal.SIGKILL)
    time.sleep(0.3)
    return "it outlives SIGKILL"


# Attempts of which the host judges the outcome.
TIME, MEMORY = "limits: outlast the time limit", "limits: take more memory"
PROCESSES = "limits: start more processes"
LOOK, END = "processes: look into the runner", "processes: end the runner"
ADDRESSES, ROUTE = "network: reach its other addresses", "network: find a way out"
DOOR, PLACEHOLDER = "network: pass the door without a rule", "secrets: have it in a variable"
ATTEMPTS: dict[str, Callable[[Any], str]] = {
    TIME: lambda at: outlast(at.hidden),
    "limits: outlast it by hiding": lambda at: connecting(f"@{at.hidden}"),
    MEMORY: lambda at: taking(at.memory_mb * 4 // 3, "MiB", lambda: b"x" * MIB),
    PROCESSES: lambda at: taking(at.pids, "processes", lambda: os.fork() or signal.sigwait([1])),
    "limits: open more files": lambda at: taking(at.open_files, "files", lambda: os.dup(0)),
    "limits: write a larger file": lambda at: writing(at.file_mb + 1, "."),
    "limits: fill temporary folders": lambda at: writing(at.tmp_mb + 1, "/tmp", "/var/tmp"),
    "limits: fill shared memory": lambda at: writing(at.shm_mb + 1, "/dev/shm"),
    "files: open one of the host": lambda at: opening(at.canary),
    "files: open it by links and /proc": lambda at: through_links(at.canary),
    "files: change it": lambda at: opening(at.canary, flags=os.O_WRONLY),
    "files: find it anywhere": lambda at: nowhere(p for p in entries(*KERNEL) if at.mark in p),
    "files: see mounts of the host": lambda _: nowhere(
        row[4] for row in words(MOUNTS) if row[4] not in OWN and not row[4].startswith(BENEATH)
    ),
    "files: change the system or its settings": lambda _: nowhere(
        path for path in (*SYSTEM, *glob(CGROUPS, recursive=True)) if os.access(path, os.W_OK)
    ),
    "files: open one of another chat": lambda at: opening(at.other, f"../..{at.other}"),
    "identity: become root": lambda _: none_of([("uid", os.setuid, 0), ("gid", os.setgid, 0)]),
    "identity: have capabilities": lambda _: nowhere(
        " ".join(row) for row in words(STATUS) if row[0].startswith("Cap") and int(row[1], 16)
    ),
    "identity: gain rights by setuid": lambda _: is_so(
        LIBC.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1, "no_new_privs is set"
    ),
    "system calls: run unfiltered": lambda _: is_so(
        ["Seccomp:", "2"] in words(STATUS), "a filter is in force"
    ),
    "system calls: make namespaces": lambda _: calls(NEW),
    "system calls: use keyrings, bpf, io_uring": lambda _: calls(INSIDES),
    "system calls: mount, or change the root": lambda _: calls(MOUNTING),
    "system calls: load modules, set the clock": lambda _: calls(MACHINE),
    "system calls: open rare sockets": lambda _: calls(SOCKETS),
    "network: reach the host's loopback": lambda at: connecting(f"127.0.0.1:{at.port}"),
    ADDRESSES: lambda at: connecting(*at.addresses),
    "network: reach its unix socket": lambda at: connecting(at.unix),
    "network: reach its abstract socket": lambda at: connecting(f"@{at.mark}"),
    # An address reserved for documentation: connecting a datagram socket sends nothing.
    ROUTE: lambda _: none_of([("192.0.2.1", connected, "192.0.2.1:9", socket.SOCK_DGRAM)]),
    "network: reach another chat": lambda at: connecting(f"127.0.0.1:{at.beside_port}"),
    DOOR: lambda at: door(at.targets),
    "secrets: find the server's environment": lambda at: not_in(glob(ENVIRONMENTS), at.variable),
    "secrets: find a value in files": lambda at: not_in(entries(*KERNEL, *READ), at.value),
    PLACEHOLDER: lambda at: is_so(
        at.value not in os.environ.get(at.secret, at.value), "there is a placeholder"
    ),
    "processes: see one of the host": lambda at: not_in(glob(COMMANDS), at.process),
    "processes: see one of another chat": lambda at: not_in(glob(COMMANDS), at.beside),
    LOOK: lambda _: opening("/proc/1/mem", "/proc/1/environ", "/proc/1/maps", "/proc/1/fd"),
    END: lambda _: end_runner(),
}

if __name__ == "__main__":
    facts = SimpleNamespace(**json.load(sys.stdin))
    # Who started this may have ignored it, and what an attempt starts is ended by it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        print(ATTEMPTS[facts.attempt](facts))
    finally:
        # The processes it has started, without itself.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.killpg(0, signal.SIGHUP)
