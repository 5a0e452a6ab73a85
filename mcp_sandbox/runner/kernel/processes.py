"""What the kernel knows of processes, and how a whole tree of them is killed.

Lineage is kept by subreapers: whatever a job starts stays below its worker, even after setsid and
double forks, and becomes a child of pid 1 when the worker dies. To end a tree, kill its worker,
then every child of pid 1 that no worker has reported.

C functions are called through the C half of `ctypes`: its Python half would take
two milliseconds to load, in every sandbox twice.
"""

from __future__ import annotations

import _ctypes
import errno
import os
import time

from mcp_sandbox.runner.kernel.native import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

# Numbers of <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001 - what ctypes builds on
    _type_ = "i"


class Address(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001
    """An address in this process; as an argument a plain number would be cut to 32 bits."""

    _type_ = "P"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


class _Program:
    """This program with the libraries that it has loaded."""

    _handle = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]


_program = _Program()


def find_function(name: str) -> _Function:
    """Return a C function that returns an int; AttributeError if the C library has none."""
    return _Function((name, _program))  # type: ignore[arg-type]


def read_errno() -> int:
    """Return the errno of the last call."""
    return _ctypes.get_errno()


def wipe_environment() -> None:
    """Empty the environment as the kernel shows it and as C code would inherit it."""
    first = environ = Address.from_address(_ctypes.dlsym(_Program._handle, "environ")).value  # noqa: SLF001
    length, fill = find_function("strlen"), find_function("memset")
    while environ and (variable := Address.from_address(environ).value):
        fill(Address(variable), 0, Address(length(Address(variable))))
        environ += _ctypes.sizeof(Address)
    if first:
        # Programs would inherit emptied strings as variables without a name.
        Address.from_address(first).value = None


_call_prctl = find_function("prctl")


def _prctl(option: int, value: int | bytes) -> None:
    if _call_prctl(option, value, 0, 0, 0) != 0:
        number = read_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


def hide_memory() -> None:
    """Keep processes of the same user from tracing this one, and from reading its /proc files."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Become an ordinary process again: /proc/self/fd and debuggers work."""
    _prctl(_PR_SET_DUMPABLE, 1)


def become_subreaper() -> bool:
    """Become the new parent of orphaned descendants; False if the kernel cannot.

    Without this (older gVisor) they fall to pid 1 at once, and their origin is lost.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return False
    # Old gVisor accepts this for pid 1 although it has no subreapers; it rejects the query.
    return bool(_call_prctl(_PR_GET_CHILD_SUBREAPER, _ctypes.byref(_Int()), 0, 0, 0) == 0)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(limits: str, oom_score: str | None) -> None:
    """Lower this process's resource limits ("number:value ...") and set its OOM score.

    For backends that cannot from outside. Before `hide_memory`, which bars writing the score.
    """
    if limits:
        import resource  # noqa: PLC0415 - not needed where the engine sets the limits

        for pair in limits.split():
            kind, value = pair.split(":")
            resource.setrlimit(int(kind), (int(value), int(value)))
    if oom_score:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(oom_score)


def rename(name: str) -> None:
    """Show as `name` in process lists, so that `pkill python` means the user's own python.

    The environment as the kernel shows it is wiped: it holds the token. Under gVisor the command
    line stays as it was.
    """
    _prctl(_PR_SET_NAME, name.encode()[:15])
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    # Fields 48 and 49 of proc(5): arg_start and arg_end; the list begins at 3.
    start, end = int(fields[45]), int(fields[46])
    if start < end:
        find_function("memset")(Address(start), 0, Address(end - start))
        title = name.encode()[: end - start - 1]
        find_function("memcpy")(Address(start), title, Address(len(title)))
    wipe_environment()


def read_stats() -> Iterator[tuple[int, list[bytes]]]:
    """Yield pid and stat fields (proc(5), from the third on) of every visible process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            yield int(name), fields


def map_parents() -> dict[int, int]:
    """Return the parent by pid of every visible process except zombies."""
    return {pid: int(fields[1]) for pid, fields in read_stats() if fields[0] not in (b"Z", b"X")}


def find_descendants(
    roots: Iterable[int], tree: dict[int, int], spared: Collection[int] = ()
) -> set[int]:
    """Return all descendants of `roots` in a map from `map_parents`, except `spared` and theirs."""
    children: dict[int, list[int]] = {}
    for pid, parent in tree.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in found and pid not in spared:
                found.add(pid)
                pending.append(pid)
    return found


def count_terminals() -> int:
    """Return how many terminals are open here; 0 when that cannot be told."""
    try:
        return len(os.listdir("/dev/pts")) - 1
    except OSError:
        return 0


def read_memory(pid: int) -> int:
    """Return the bytes of memory that a process holds; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def read_share_of_memory(pid: int) -> int:
    """Return as `read_memory` does, of what it shares with others only its part. Slow."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return int(file.read().partition(b"\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        # Gone, or a kernel without it.
        return read_memory(pid)


def send(pid: int, number: int) -> None:
    """Signal a process, if it still exists."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # Permission: a program with another identity; the backend ends it with the sandbox.
        return


def freeze(roots: Collection[int], spared: Collection[int] = (), *, rounds: int = 20) -> set[int]:
    """Stop everything below `roots` except `spared`, in rounds until nothing new is found.

    A stopped process cannot fork, so this stops even a fork bomb.
    """
    stopped: set[int] = set()
    for _ in range(rounds):
        fresh = find_descendants(roots, map_parents(), spared) - stopped
        if not fresh:
            break
        for pid in fresh:
            send(pid, signal.SIGSTOP)
        stopped |= fresh
    return stopped


def kill_trees(roots: Collection[int], spared: Collection[int] = ()) -> None:
    """Kill `roots` and everything visible below them, except `spared`."""
    for pid in (*freeze(roots, spared), *roots):
        send(pid, signal.SIGKILL)


def read_session(pid: int) -> int | None:
    """Return the leader of a process's session; None when the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def read_clock_ticks() -> float:
    """Return a time no later than the `read_start_ticks` of a process that begins now."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") - 1


def read_start_ticks(pid: int) -> float:
    """Return when a process began, in clock ticks since boot; infinite when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Field 22 of proc(5); the list begins at 3.
            return float(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return float("inf")
