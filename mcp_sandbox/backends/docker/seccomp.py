"""The seccomp profile of a sandbox, in the engine's JSON format.

A list of what is allowed; anything else is refused with EPERM. Beyond what Docker refuses by
default it leaves out io_uring and 32-bit calls (`socketcall` cannot be filtered by family), and
opens only unix, internet and routing-netlink sockets: no AF_VSOCK, AF_ALG, AF_PACKET, AF_KEY,
AF_XDP. keyctl, userfaultfd, bpf, perf_event_open, mount, setns, unshare are in no list.
"""

import json
from functools import cache
from typing import Any

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
io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 poll ppoll pselect6
select semctl semget semop semtimedop shmat shmctl shmdt shmget signalfd signalfd4
"""
_SOCKETS = """
accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg
sendmmsg sendmsg sendto setsockopt shutdown
"""


@cache
def profile_text() -> str:
    """The profile as JSON, which is what the engine takes."""
    return json.dumps(profile(), separators=(",", ":"))


def profile() -> dict[str, Any]:
    """The profile as a value."""
    allowed = " ".join((_FILES, _PROCESSES, _MEMORY, _TIME, _WAITING, _SOCKETS)).split()
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in _NATIVE],
        "syscalls": [
            {"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"},
            *(_allow("socket", (0, family)) for family in (_AF_UNIX, _AF_INET, _AF_INET6)),
            # Before it refuses a pair of another family the kernel loads modules, makes sockets.
            _allow("socketpair", (0, _AF_UNIX)),
            _allow("socket", (0, _AF_NETLINK), (2, _NETLINK_ROUTE)),
            *(_allow("personality", (0, value)) for value in _PERSONALITIES),
            _clone_without_namespaces(),
            # Its flags are out of a filter's sight; with "no such call" libc falls back to clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        ],
    }


def _allow(name: str, *arguments: tuple[int, int]) -> dict[str, Any]:
    args = [
        {"index": index, "value": value, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
        for index, value in arguments
    ]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}


def _clone_without_namespaces() -> dict[str, Any]:
    masked = {"index": 0, "value": _NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [masked]}
