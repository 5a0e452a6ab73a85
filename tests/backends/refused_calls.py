"""Runs inside a sandbox: tries what must be refused, prints as JSON what was not."""

import ctypes
import errno
import json
import os
import platform
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
wrong: list[str] = []


def attempt(name: str, expected: int, number: int, *args: int) -> None:
    ctypes.set_errno(0)
    result = libc.syscall(number, *(ctypes.c_long(arg) for arg in args))
    if result != -1 or ctypes.get_errno() != expected:
        wrong.append(f"{name}: {result}, {errno.errorcode.get(ctypes.get_errno())}")


EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}
HERE = (
    {
        "io_setup": 206,
        "keyctl": 250,
        "add_key": 248,
        "request_key": 249,
        "userfaultfd": 323,
        "bpf": 321,
        "perf_event_open": 298,
        "mount": 165,
        "umount2": 166,
        "unshare": 272,
        "setns": 308,
        "pivot_root": 155,
        "chroot": 161,
        "init_module": 175,
        "finit_module": 313,
        "delete_module": 176,
        "reboot": 169,
        "swapon": 167,
        "kexec_load": 246,
        "open_by_handle_at": 304,
        "acct": 163,
        "settimeofday": 164,
        "kcmp": 312,
        "fanotify_init": 300,
        "syslog": 103,
        "iopl": 172,
        "quotactl": 179,
    }
    if X86
    else {"keyctl": 219, "bpf": 280, "mount": 40, "unshare": 97, "setns": 268, "reboot": 142}
)
for name, number in {**EVERYWHERE, **HERE}.items():
    attempt(name, errno.EPERM, number, 0, 0, 0, 0, 0, 0)

attempt("clone3", errno.ENOSYS, 435, 0, 0)
attempt("a call nobody knows", errno.ENOSYS, 4000)
for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    attempt(f"clone with {bit:#x}", errno.EPERM, 56 if X86 else 220, bit | 17, 0, 0, 0, 0)
attempt("personality", errno.EPERM, 135 if X86 else 92, 0x0040000)
if X86:
    attempt("x32 getpid", errno.EPERM, 0x40000000 | 39)

master, slave = os.openpty()
for request in (0x5412, 0x541C, 0x100005412):
    attempt(f"ioctl {request:#x}", errno.EPERM, 16 if X86 else 29, slave, request, 0)

for family in (3, 5, 15, 17, 31, 38, 40, 44):
    try:
        socket.socket(family, socket.SOCK_RAW).close()
    except PermissionError:
        continue
    except OSError as exc:
        wrong.append(f"socket family {family}: {exc}")
        continue
    wrong.append(f"socket family {family} opened")
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family, socket.SOCK_STREAM).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
if os.fork() == 0:
    os._exit(0)
os.wait()

sys.stdout.write(json.dumps(wrong))
