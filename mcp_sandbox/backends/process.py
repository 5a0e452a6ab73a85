"""Processes of the host that outlive the server that started them: start, recognise, end.

A process is remembered by its number, its start time and the boot it belongs to, so that a number
that was given to another process is never taken for it. Knows no sandboxes.
"""

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

_GONE_LIMIT_S = 10.0


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine that no other one can be taken for.

    `started` is in clock ticks since the boot.
    """

    pid: int
    started: int
    boot: str


class Stat(NamedTuple):
    """What /proc/PID/stat tells."""

    state: str
    parent: int
    started: int


@cache
def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat(pid: int) -> Stat | None:
    """State of a process, or None when there is none of that number."""
    try:
        return _parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _parse_stat(text: str) -> Stat:
    # The program's name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def ourselves() -> ProcessId:
    """The identity of this process."""
    own = _parse_stat(Path("/proc/self/stat").read_text(errors="replace"))
    return ProcessId(os.getpid(), own.started, boot_id())


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, or None when it has ended."""
    found = stat(pid)
    if found is None or found.state in "ZX":
        return None
    return ProcessId(pid, found.started, boot_id())


def is_alive(process: ProcessId) -> bool:
    """True while this very process runs; a zombie does not."""
    return identify(process.pid) == process


@dataclass(frozen=True)
class Start:
    """How to start a program: nothing of our own environment or open files reaches it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    descriptors: Sequence[int] = ()
    stderr: int = subprocess.DEVNULL
    directory: str = "/"


def start(how: Start) -> int:
    """Start a program in a session of its own, and return its process number.

    Blocks for about a millisecond. The caller reaps it with `reap` at some time.

    Raises:
        OSError: the program cannot be started.
    """
    with subprocess.Popen(  # noqa: S603 - a fixed program by its whole path, without a shell
        how.argv,
        env=how.env,
        cwd=how.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=how.stderr,
        pass_fds=how.descriptors,
        start_new_session=True,
    ) as child:
        # It is meant to outlive us: without a known exit code the object would wait for it here.
        child.returncode = 0
        return child.pid


def reap(pid: int) -> bool:
    """Collect a child of ours that has ended; True when there is nothing more to collect."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def hold(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when the process ends; None when it has ended.

    The caller closes it.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Only now is the number held; before, it may have gone to another process.
    if is_alive(process):
        return descriptor
    os.close(descriptor)
    return None


def has_ended(descriptor: int) -> bool:
    """Whether the process of a descriptor from `hold` has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


async def end(process: ProcessId, number: signal.Signals | None, *, limit_s: float) -> bool:
    """Send a signal, if one is given, and wait for the end; False when it does not come in time."""
    descriptor = await anyio.to_thread.run_sync(hold, process)
    if descriptor is None:
        return True
    try:
        if number is not None:
            # It may have ended, and been collected, since it was looked at.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        with anyio.move_on_after(limit_s, shield=True):
            await anyio.wait_readable(descriptor)
        return has_ended(descriptor)
    finally:
        os.close(descriptor)


async def kill(process: ProcessId) -> bool:
    """End a process; False when the kernel does not let go of it in time."""
    return await end(process, signal.SIGKILL, limit_s=_GONE_LIMIT_S)


def stop_below(root: int, *, rounds: int = 20) -> list[ProcessId]:
    """Stop everything below a process, until nothing new turns up; returns what was stopped.

    A stopped process cannot fork, so even a fork bomb comes to rest.
    """
    stopped: dict[int, ProcessId] = {}
    for _ in range(rounds):
        fresh = [pid for pid in descendants(root) if pid not in stopped]
        if not fresh:
            break
        for process in filter(None, map(identify, fresh)):
            stopped[process.pid] = process
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
    return list(stopped.values())


def descendants(root: int) -> list[int]:
    """Every running process below `root`, as /proc shows it now."""
    children: dict[int, list[int]] = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        found = stat(pid)
        if found is not None and found.state not in "ZX":
            children.setdefault(found.parent, []).append(pid)
    below: list[int] = []
    pending = [root]
    while pending:
        fresh = children.get(pending.pop(), [])
        below += fresh
        pending += fresh
    return below
