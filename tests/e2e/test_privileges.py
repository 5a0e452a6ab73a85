"""Code in a sandbox has no rights, gains none, and finds no door of the kernel open."""

import errno
import os
from collections.abc import Mapping

import pytest

from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import on_gvisor_if_whole, on_the_host_kernel, probe


@pytest.fixture
def session(shared: Session) -> Session:
    """Nothing that is tried here changes the sandbox."""
    return shared


_STATUS = """
import json
lines = open("/proc/self/status").read().splitlines()
print(json.dumps({key: value.strip() for key, _, value in (line.partition(":") for line in lines)}))
"""


async def test_code_runs_without_any_privilege(session: Session, backend_name: str) -> None:
    status: Mapping[str, str] = await probe(session, _STATUS)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
        assert int(status[name], 16) == 0, (name, status)
    assert "0" not in status["Uid"].split() + status["Gid"].split()
    if backend_name != "docker-runsc":
        assert (status["NoNewPrivs"], status["Seccomp"], status["CapAmb"]) == ("1", "2", "0" * 16)
        assert status.get("Groups", "").split() in ([], status["Gid"].split()[:1])


_SETUID = """
import json, os, shutil, subprocess, time
found, gained = [], []
search = "find /usr /bin/ /sbin/ /opt -path /usr/share -prune -o -perm /6000 -type f -print"
found += subprocess.run(search.split(), capture_output=True, text=True).stdout.splitlines()
for folder in ("/workspace", "/tmp", "/home/sandbox", "/dev/shm"):
    try:
        shutil.copy("/bin/sleep", folder + "/own"); os.chmod(folder + "/own", 0o6755)
        found.append(folder + "/own")
    except OSError:
        pass
quiet = {"stdin": subprocess.PIPE, "stdout": -3, "stderr": -3}
su = subprocess.Popen(["su", "-c", "id -u"], **{**quiet, "stdout": subprocess.PIPE})
started = {}
for path in found:
    try:
        started[path] = subprocess.Popen([path, "5"], **quiet)
    except OSError:
        continue
for _ in range(25):
    for path, child in started.items():
        try:
            lines = open(f"/proc/{child.pid}/status").read().splitlines()
        except OSError:
            continue
        rights = [line for line in lines if line.startswith(("Uid", "Gid", "CapEff"))]
        if any("0" in line.split()[1:] for line in rights if line[0] in "UG") or any(
            int(line.split()[1], 16) for line in rights if line[0] == "C"
        ):
            gained.append([path, rights])
    time.sleep(0.002)
for child in started.values():
    child.kill(); child.wait()
said = su.communicate(b"\\n", timeout=20)[0]
print(json.dumps([len(found), gained, said.decode()]))
"""


async def test_no_setuid_program_gains_anything(session: Session) -> None:
    tried, gained, su = await probe(session, _SETUID)
    assert tried >= 2
    assert gained == []
    assert su.strip() != "0"


# Calls of x86-64 that reach parts of the kernel nobody inside needs, with harmless arguments.
_CALLS = {
    "io_uring_setup": (425, 1, 0),
    "io_uring_enter": (426, 0, 0, 0, 0, 0),
    "io_uring_register": (427, 0, 0, 0, 0),
    "keyctl": (250, 0, -3, 1),
    "add_key": (248, 0, 0, 0, 0, -3),
    "request_key": (249, 0, 0, 0, -3),
    "bpf": (321, 0, 0, 0),
    "userfaultfd": (323, 0),
    "userfaultfd_user_mode": (323, 1),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "unshare_user": (272, 0x10000000),
    "unshare_mount": (272, 0x00020000),
    "unshare_net": (272, 0x40000000),
    "clone_user": (56, 0x10000011, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "setns": (308, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 2),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "fsopen": (430, 0, 0),
    "fsmount": (432, 0, 0, 0),
    "open_tree": (428, -100, 0, 0),
    "move_mount": (429, -1, 0, -1, 0, 0),
    "mount_setattr": (442, -100, 0, 0, 0, 0),
    "open_by_handle_at": (304, -100, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "delete_module": (176, 0, 0),
    "swapon": (167, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
    "acct": (163, 0),
    "iopl": (172, 3),
    "ioperm": (173, 0, 1, 1),
    "syslog": (103, 3, 0, 0),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "sethostname": (170, 0, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "lookup_dcookie": (212, 0, 0, 0),
    "kcmp": (312, 1, 1, 0, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "move_pages": (279, 1, 0, 0, 0, 0, 0),
    "personality_no_random": (135, 0x0040000),
    "ptrace_attach_first": (101, 16, 1, 0, 0),
    "ptrace_seize_first": (101, 0x4206, 1, 0, 0),
    "read_first_memory": (310, 1, 0, 0, 0, 0, 0),
    "x32_keyctl": (0x40000000 | 250, 0, -3, 1),
    "socket_vsock": (41, 40, 1, 0),
    "socket_alg": (41, 38, 5, 0),
    "socket_packet": (41, 17, 3, 0),
    "socket_key": (41, 15, 3, 2),
    "socket_xdp": (41, 44, 3, 0),
    "socket_bluetooth": (41, 31, 3, 1),
    "socket_can": (41, 29, 3, 1),
    "socket_tipc": (41, 30, 1, 0),
    "socket_raw": (41, 2, 3, 1),
    "socket_family_high_bits": (41, 0x100000000 | 40, 1, 0),
}

_TRY_CALLS = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
found = {{}}
iov = (ctypes.c_long * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
for name, (number, *arguments) in {calls!r}.items():
    if name == "read_first_memory":
        arguments = [1, ctypes.addressof(iov), 1, ctypes.addressof(iov), 1, 0]
    child = os.fork()
    if child == 0:
        parent = os.getpid()
        result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
        if os.getpid() != parent:
            os._exit(0)
        os._exit(ctypes.get_errno() if result == -1 else 0)
    _, status = os.waitpid(child, 0)
    found[name] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
print(json.dumps(found))
"""


@on_the_host_kernel
async def test_the_kernels_side_doors_are_shut(session: Session) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    found: Mapping[str, int] = await probe(session, _TRY_CALLS.format(calls=_CALLS))
    refused = {errno.EPERM, errno.ENOSYS, -31}  # 31 is SIGSYS
    open_doors = {name: code for name, code in found.items() if code not in refused}
    # The first process is hidden, not filtered: it may also be said not to exist.
    assert not {name for name in open_doors if not name.endswith(("_first", "_memory"))}, open_doors
    assert set(open_doors.values()) <= {errno.ESRCH, errno.EACCES}, open_doors


_NETLINK = {
    "audit": (41, 16, 3, 9),
    "netfilter": (41, 16, 3, 12),
    "crypto": (41, 16, 3, 21),
    "xfrm": (41, 16, 3, 6),
    "uevent": (41, 16, 3, 15),
    "audit_pair": (53, 16, 3, 9),
    "tipc_pair": (53, 30, 1, 0),
    "vsock_pair": (53, 40, 1, 0),
}


@on_the_host_kernel
async def test_of_netlink_only_routes_can_be_asked_for(session: Session) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    found: Mapping[str, int] = await probe(session, _TRY_CALLS.format(calls=_NETLINK))
    assert {name for name, code in found.items() if code != errno.EPERM} == set()


_OLD_CALLS = """
import ctypes, json, mmap, os
# int 0x80 with the number of a call of 32-bit programs: mov eax, n; int 0x80; ret
found = {}
for name, number in (("getpid", 20), ("socketcall", 102), ("keyctl", 288), ("io_uring", 425)):
    child = os.fork()
    if child == 0:
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(b"\\x53\\x31\\xdb\\x31\\xc9\\x31\\xd2\\xb8" + number.to_bytes(4, "little")
                   + b"\\xcd\\x80\\x5b\\xc3")
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        result = ctypes.CFUNCTYPE(ctypes.c_int)(start)()
        os._exit(0 if result >= 0 else -result)
    _, status = os.waitpid(child, 0)
    found[name] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
print(json.dumps(found))
"""


@on_the_host_kernel
async def test_calls_of_32_bit_programs_do_not_pass_the_filter_by(session: Session) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("an x86 instruction")
    found: Mapping[str, int] = await probe(session, _OLD_CALLS)
    assert not {name for name, code in found.items() if code not in (-31, -11, 1, 38)}, found


_WRITABLE = """
import json, os, stat
mounts = [line.split() for line in open("/proc/self/mountinfo")]
places = []
for fields in mounts:
    at = fields[4].replace("\\\\040", " ")
    if not os.path.isdir(at):
        continue
    folders = [at]
    if os.access(at, os.R_OK | os.X_OK) and not at.startswith("/proc"):
        folders += [e.path for e in os.scandir(at) if e.is_dir(follow_symlinks=False)][:200]
    for folder in folders:
        try:
            path = os.path.join(folder, "planted")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.unlink(path)
            places.append(folder)
        except OSError:
            pass
files = []
for root in ("/sys", "/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/etc",
             "/opt", "/usr", "/bin", "/lib", "/run", "/var"):
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.islink(path) or not os.access(path, os.W_OK):
                    continue
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                files.append(path)
            except OSError:
                pass
for name in os.listdir("/proc"):
    path = "/proc/" + name
    if not name.isdigit() and os.path.isfile(path) and not os.path.islink(path):
        try:
            os.close(os.open(path, os.O_WRONLY)); files.append(path)
        except OSError:
            pass
modes = {e.path: e.stat(follow_symlinks=False).st_mode for e in os.scandir("/dev")}
devices = [path for path, mode in modes.items() if stat.S_ISBLK(mode) or stat.S_ISCHR(mode)]
doors = '''
    /var/run/docker.sock /run/docker.sock /run/containerd /run/systemd /run/dbus /run/user
    /proc/kcore /dev/kvm /dev/mem /dev/fuse /dev/net/tun /dev/vda /dev/sda /dev/kmsg /dev/vsock
    /dev/userfaultfd
'''.split()
doors = [p for p in doors if os.access(p, os.R_OK) or os.access(p, os.W_OK)]
for p in list(doors):
    try:
        if not open(p, "rb", 0).read(1):
            doors.remove(p)
    except OSError:
        doors.remove(p)
root = [fields[5].split(",")[0] for fields in mounts if fields[4] == "/"][-1]
print(json.dumps([sorted(set(places)), files, sorted(devices), doors, root]))
"""

_DEVICES = {
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
} | {"/dev/console", "/dev/net/tun"}


@on_gvisor_if_whole
async def test_only_the_chats_own_places_are_writable(session: Session, backend_name: str) -> None:
    await session.exec("find /workspace /home/sandbox /tmp /dev/shm -mindepth 1 -delete")
    places, files, devices, doors, root = await probe(session, _WRITABLE)
    ours = {"/workspace", "/home/sandbox", "/tmp", "/dev/shm", "/var/tmp"}
    known = set(_DEVICES)
    if backend_name == "docker":
        # Message queues: the kernel's own limits and the memory limit bound them.
        ours.add("/dev/mqueue")
    if backend_name == "docker-runsc":
        known.add("/dev/fuse")  # gVisor's own, not the host's
        # The socket is made on a file system in memory there, of one megabyte.
        ours.add("/run/mcp-sandbox")
    assert {"/workspace", "/home/sandbox", "/tmp", "/dev/shm"} <= set(places), places
    assert set(places) <= ours, places
    # A socket may be opened for nothing, and the terminal multiplexer makes terminals.
    assert [path for path in files if not path.endswith("runner.sock")] == []
    assert set(devices) <= known, devices
    assert doors == []
    assert root == "ro"


_FIRST = """
import json, os
opened = []
for pid in (1, *map(int, filter(str.isdigit, os.listdir("/proc")))):
    try:
        shown = open(f"/proc/{pid}/cmdline").read()
    except OSError:
        continue
    if pid == os.getpid() or pid != 1 and not shown.startswith("mcp-sandbox"):
        continue
    for name, flags in (("mem", os.O_RDWR), ("mem", os.O_RDONLY), ("environ", os.O_RDONLY),
                        ("maps", os.O_RDONLY), ("fd", os.O_RDONLY), ("root", os.O_RDONLY),
                        ("cwd", os.O_RDONLY), ("exe", os.O_RDONLY), ("map_files", os.O_RDONLY),
                        ("syscall", os.O_RDONLY), ("stack", os.O_RDONLY), ("auxv", os.O_RDONLY)):
        path = f"/proc/{pid}/{name}"
        try:
            os.close(os.open(path, flags))
            opened.append(path)
        except OSError:
            pass
print(json.dumps(opened))
"""


@on_the_host_kernel
async def test_the_runner_and_its_workers_cannot_be_looked_into(session: Session) -> None:
    await session.exec("true")
    assert await probe(session, _FIRST) == []
