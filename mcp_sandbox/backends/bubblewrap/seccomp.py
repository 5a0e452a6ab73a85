"""The system call filter of a bubblewrap sandbox, as a classic BPF program.

It refuses what the Docker backend's profile refuses: what Docker's default refuses to a container
without capabilities, and also io_uring (it could open sockets past this filter), keyrings, bpf,
userfaultfd, io_setup, performance counters, and sockets but local, internet and routing ones.
It also refuses writes to a terminal's input queue, because terminals are the host's.
Pure: makes bytes for `bwrap --seccomp`, knows no sandbox.
"""

import errno
import struct
from collections.abc import Iterable

from mcp_sandbox.errors import BackendUnavailable

_LOAD, _JUMP, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS

_X32_BIT = 0x40000000
# Calls above the newest one that was reviewed (file_setattr, Linux 6.17) count as unknown.
_NEWEST = 469
_NAMESPACES = 0x7E020000
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_LOCAL = 1
_INTERNET = (2, 10)
_NETLINK, _ROUTES = 16, 0
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# Each call and its number.
_COMMON = """
open_tree 428 move_mount 429 fsopen 430 fsconfig 431 fsmount 432 fspick 433 io_uring_setup 425
io_uring_enter 426 io_uring_register 427 pidfd_getfd 438 process_madvise 440 mount_setattr 442
quotactl_fd 443 set_mempolicy_home_node 450 statmount 457 listmount 458 lsm_set_self_attr 460
open_tree_attr 467
"""
_X86_64 = """
sysfs 139 uselib 134 ustat 136 vhangup 153 modify_ldt 154 pivot_root 155 _sysctl 156 adjtimex 159
chroot 161 acct 163 settimeofday 164 mount 165 umount2 166 swapon 167 swapoff 168 reboot 169
sethostname 170 setdomainname 171 iopl 172 ioperm 173 create_module 174 init_module 175
delete_module 176 get_kernel_syms 177 query_module 178 quotactl 179 nfsservctl 180 getpmsg 181
putpmsg 182 afs_syscall 183 tuxcall 184 security 185 set_thread_area 205 get_thread_area 211
lookup_dcookie 212 clock_settime 227 vserver 236 mbind 237 set_mempolicy 238 get_mempolicy 239
kexec_load 246 add_key 248 request_key 249 keyctl 250 migrate_pages 256 unshare 272 move_pages 279
perf_event_open 298 fanotify_init 300 open_by_handle_at 304 clock_adjtime 305 setns 308 kcmp 312
finit_module 313 kexec_file_load 320 bpf 321 userfaultfd 323 syslog 103 io_setup 206
"""
_AARCH64 = """
lookup_dcookie 18 umount2 39 mount 40 pivot_root 41 nfsservctl 42 chroot 51 vhangup 58 quotactl 60
acct 89 unshare 97 kexec_load 104 init_module 105 delete_module 106 clock_settime 112 syslog 116
reboot 142 sethostname 161 setdomainname 162 settimeofday 170 adjtimex 171 add_key 217 io_setup 0
request_key 218 keyctl 219 swapon 224 swapoff 225 mbind 235 get_mempolicy 236 set_mempolicy 237
migrate_pages 238 move_pages 239 perf_event_open 241 fanotify_init 262 open_by_handle_at 265
clock_adjtime 266 setns 268 kcmp 272 finit_module 273 bpf 280 userfaultfd 282 kexec_file_load 294
"""


def _numbers(table: str) -> dict[str, int]:
    words = table.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


REFUSED = {"x86_64": _numbers(_X86_64 + _COMMON), "aarch64": _numbers(_AARCH64 + _COMMON)}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# What a process that neither starts nor writes anything is refused beside that.
_LONELY = {
    "x86_64": _numbers("""
    fork 57 vfork 58 execve 59 kill 62 truncate 76 rename 82 mkdir 83 rmdir 84 creat 85 link 86
    unlink 87 symlink 88 chmod 90 chown 92 lchown 94 ptrace 101 rt_sigqueueinfo 129 mknod 133
    setpriority 141 setxattr 188 lsetxattr 189 tkill 200 mkdirat 258 mknodat 259 fchownat 260
    unlinkat 263 renameat 264 linkat 265 symlinkat 266 fchmodat 268 rt_tgsigqueueinfo 297
    listen 50 process_vm_readv 310 process_vm_writev 311 renameat2 316 execveat 322 openat2 437
    pidfd_send_signal 424 pidfd_open 434
    """),
    "aarch64": _numbers("""
    setxattr 5 lsetxattr 6 mknodat 33 mkdirat 34 unlinkat 35 symlinkat 36 linkat 37 renameat 38
    truncate 45 fchmodat 53 fchownat 54 ptrace 117 kill 129 tkill 130 rt_sigqueueinfo 138
    setpriority 140 listen 201 execve 221 rt_tgsigqueueinfo 240 process_vm_readv 270
    process_vm_writev 271 renameat2 276 execveat 281 openat2 437 pidfd_send_signal 424
    pidfd_open 434
    """),
}
# open (which aarch64 lacks), openat, tgkill, prlimit64
_LOOKED_INTO_LONELY = {"x86_64": (2, 257, 234, 302), "aarch64": (-1 & 0xFFFF, 56, 131, 261)}
_WRITING, _THREAD = 0o3 | 0o100 | 0o1000 | 0o2000 | 0o20000000, 0x10000
# clone, clone3, ioctl, socket, socketpair, personality
_LOOKED_INTO = {"x86_64": (56, 435, 16, 41, 53, 135), "aarch64": (220, 435, 29, 198, 199, 92)}


def program(machine: str, lonely: int = 0) -> bytes:
    """Return the filter for a machine as `os.uname().machine` names it.

    `lonely` is the id of a process of the host that only talks to the network, but may open files
    for reading and start threads.

    Raises BackendUnavailable: there is none for this machine.
    """
    if machine not in REFUSED:
        raise BackendUnavailable(
            f"the bubblewrap backend has no system call filter for {machine} machines "
            f"(only {', '.join(REFUSED)}); use the docker backend"
        )
    clone, clone3, ioctl, socket, socketpair, personality = _LOOKED_INTO[machine]
    # Of netlink only routing, where the C library reads the addresses of interfaces.
    routes = _when(_JEQ, _NETLINK, (_load(_ARGS + 16), *_allow_only((_ROUTES,))))
    return b"".join(
        (
            _load(_ARCH),
            _instruction(_JEQ, _AUDIT_ARCH[machine], 1, 0),
            _return(_KILL),
            _load(_NR),
            *(_when(_JGE, _X32_BIT, (_return(_REFUSE),)) if machine == "x86_64" else ()),
            *_when(_JGE, _NEWEST + 1, (_return(_UNKNOWN),)),
            *_when(_JEQ, clone3, (_return(_UNKNOWN),)),
            *(_refuse_company(machine, lonely) if lonely else ()),
            *_search(sorted(REFUSED[machine].values())),
            *_argument(clone, 0, *_when(_JSET, _NAMESPACES, (_return(_REFUSE),))),
            *_argument(ioctl, 1, *_refuse_each(_TERMINAL_INPUT)),
            *_argument(socket, 0, *routes, *_allow_only((_LOCAL, *_INTERNET))),
            *_argument(socketpair, 0, *_allow_only((_LOCAL,))),
            *_argument(personality, 0, *_allow_only(_PERSONALITIES)),
            _return(_ALLOW),
        )
    )


def _refuse_company(machine: str, pid: int) -> tuple[bytes, ...]:
    clone, _, _, sock, *_ = _LOOKED_INTO[machine]
    opening, opening_at, tgkill, prlimit = _LOOKED_INTO_LONELY[machine]
    own_thread = (_instruction(_JSET, _THREAD, 1, 0), _return(_REFUSE))
    read = _when(_JSET, _WRITING, (_return(_REFUSE),))
    return (
        *_refuse_each(_LONELY[machine].values()),
        *_when(_JEQ, clone, (_load(_ARGS), *own_thread, _load(_NR))),
        *_when(_JEQ, sock, (_load(_ARGS), *_refuse_each((_LOCAL,)), _load(_NR))),
        *_argument(opening, 1, *read),
        *_argument(opening_at, 2, *read),
        *_argument(tgkill, 0, *_allow_only((pid,))),
        *_argument(prlimit, 0, *_allow_only((0,))),
    )


def refusing_nothing() -> bytes:
    """Return a filter that allows every call, for sandboxes without walls."""
    return _return(_ALLOW)


def _search(numbers: list[int]) -> tuple[bytes, ...]:
    """Refuse each of the sorted numbers, by binary search, so that allowed calls are cheap."""
    if len(numbers) <= 3:
        return _refuse_each(numbers)
    middle = len(numbers) // 2
    lower, upper = _search(numbers[:middle]), _search(numbers[middle:])
    skip_upper = _instruction(_JUMP, len(upper))
    return (_instruction(_JGE, numbers[middle], len(lower) + 1, 0), *lower, skip_upper, *upper)


def _refuse_each(values: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(part for value in values for part in _when(_JEQ, value, (_return(_REFUSE),)))


def _allow_only(values: Iterable[int]) -> tuple[bytes, ...]:
    allowed = tuple(part for value in values for part in _when(_JEQ, value, (_return(_ALLOW),)))
    return (*allowed, _return(_REFUSE))


def _when(test: int, value: int, then: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Run `then` when the loaded word passes the test; else skip it."""
    return (_instruction(test, value, 0, len(then)), *then)


def _argument(call: int, index: int, *checks: bytes) -> tuple[bytes, ...]:
    """Check an argument of one call, and allow what no check refuses.

    Only the low half is loaded: the kernel takes these arguments as 32-bit numbers.
    """
    return _when(_JEQ, call, (_load(_ARGS + 8 * index), *checks, _return(_ALLOW)))


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, action)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
