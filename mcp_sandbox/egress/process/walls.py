"""What the kernel refuses to the process of the ways out, from the moment it serves.

No file but what the C library reads to look up names, no writing, no program, no other process, no
unix socket but those it has, no port to listen at. Landlock (Linux 5.13) where the kernel has it,
seccomp on x86-64 and aarch64, a user of its own where the server is root, and limits everywhere.
"""

import ctypes
import os
import resource
import struct
from contextlib import suppress
from pathlib import Path

from mcp_sandbox.backends.bubblewrap.seccomp import REFUSED, program

# Numbers of the calls on every machine, of include/uapi/linux/{landlock,prctl,seccomp}.h.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_SET_DUMPABLE, _SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 4, 22, 2, 38
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# What each version may refuse of files: the first 13 rights, then REFER, TRUNCATE, IOCTL_DEV.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_BIND, _ABSTRACT_SOCKETS_AND_SIGNALS = 1, 3
NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf")
"""The files that say how names are looked up."""
_MOST_DATA, _LARGEST_FILE = 2 << 30, 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def close_walls() -> None:
    """Close them around this process and the threads it starts. Raises OSError: one cannot be."""
    _limit()
    if os.geteuid() == 0:
        # A user that nobody else is: so no file, process or socket is its own.
        os.setgroups([])
        own = 1 << 30 | os.getpid()
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
        # Else it could not open /proc/self/fd, of which certificates are read.
        _check(_libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _refuse_files()
    if (machine := os.uname().machine) in REFUSED:
        filtering = program(machine, lonely=os.getpid())
        code = ctypes.create_string_buffer(filtering, len(filtering))
        fields = struct.pack("HxxxxxxP", len(filtering) // 8, ctypes.addressof(code))
        _check(_libc.prctl(_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(fields), 0, 0))


def _limit() -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit, value in (
        (resource.RLIMIT_NOFILE, most_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _LARGEST_FILE),
        (resource.RLIMIT_DATA, _MOST_DATA),
    ):
        resource.setrlimit(limit, (value, value))
    # One chat's traffic gives way to other chats' calls.
    os.nice(5)


def _refuse_files() -> None:
    version = _libc.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return  # An older kernel, or one that has it switched off.
    rights = next(_RIGHTS[each] for each in sorted(_RIGHTS, reverse=True) if each <= version)
    fields = struct.pack("QQQ", rights, _BIND, _ABSTRACT_SOCKETS_AND_SIGNALS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _check(_libc.syscall(_CREATE, ctypes.create_string_buffer(fields), size, 0))
    for path in (*map(Path, NAMES), *_libraries()):
        with suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place))
            _check(_libc.syscall(_ADD, rules, 1, rule, 0))
            os.close(place)
    _check(_libc.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _libraries() -> set[Path]:
    """Return the folders of the C library, which loads more of itself to look up a name."""
    lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    found = {Path(line.split(None, 5)[-1]) for line in lines if "/" in line}
    return {each.parent for each in found if each.name.startswith(("libc.so", "libc-2", "ld-musl"))}


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the walls of the ways out cannot be closed: {os.strerror(number)}")
    return result
