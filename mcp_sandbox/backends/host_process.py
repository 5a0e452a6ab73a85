"""Processes of the host that outlive the server that started them: recognise, look at, end them.

One is known by its number, its start time and the boot, so no other can be taken for it.
"""

import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread

from mcp_sandbox.durable import closing_fd

_GONE_LIMIT_S = 10.0
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine; `started` is in clock ticks since the boot."""

    pid: int
    started: int
    boot: str


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]), boot_id())


def is_alive(process: ProcessId) -> bool:
    """Return whether this very process runs; a zombie does not."""
    return identify(process.pid) == process


def reap(pid: int) -> bool:
    """Collect an ended child process; return True if nothing is left to collect."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def hold(process: ProcessId) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if it has ended.

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
    """Return whether the process of a descriptor from `hold` has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


async def end(process: ProcessId, number: signal.Signals | None, *, limit_s: float) -> bool:
    """Send a signal, if one is given, and wait for the end; False when it does not come in time."""
    descriptor = await anyio.to_thread.run_sync(hold, process)
    if descriptor is None:
        return True
    with closing_fd(descriptor):
        if number is not None:
            # It may have ended, and been collected, since it was looked at.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        with anyio.move_on_after(limit_s, shield=True):
            await anyio.wait_readable(descriptor)
        return has_ended(descriptor)


async def kill(process: ProcessId) -> bool:
    """End a process; False when the kernel does not let go of it in time."""
    return await end(process, signal.SIGKILL, limit_s=_GONE_LIMIT_S)


def wrong_status(status: str, user: str) -> list[str]:
    """Return how /proc/PID/status is weaker than a first process must be; `user`: UID:GID."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user_id, _, group_id = user.partition(":")
    wanted = {
        "NoNewPrivs": "1",
        "Seccomp": "2",
        **dict.fromkeys(_CAPABILITIES, "0" * 16),
        "Uid": "\t".join([user_id] * 4),
        "Gid": "\t".join([group_id] * 4),
    }
    return [
        f"{name} should be {value!r} and is {fields.get(name, 'not shown')!r}"
        for name, value in wanted.items()
        if fields.get(name) != value
    ]


def wrong_mounts(mountinfo: str, wanted: Mapping[str, bool]) -> list[str]:
    """Return what /proc/PID/mountinfo lacks; `wanted` maps each mount point to: is read-only.

    A mount that went through a link lies elsewhere than it should.
    """
    lines = (line.split(" ") for line in mountinfo.splitlines())
    # Of several at one place the last one is seen.
    found = {fields[4]: fields[5].split(",") for fields in lines if len(fields) > 5}
    return [
        f"nothing is mounted at {target}"
        if target not in found
        else f"{target} can be written to and should be read-only"
        for target, read_only in wanted.items()
        if target not in found or (read_only and "ro" not in found[target])
    ]
