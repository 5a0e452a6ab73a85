"""Starts bwrap, holds the new sandbox until its limits are set, and lets it go.

bwrap tells the process number of the sandbox's pid 1 and then waits for a byte from us: nothing
of the sandbox runs before it is in its control groups and under its resource limits.
"""

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from mcp_sandbox.backends import process
from mcp_sandbox.backends.bubblewrap.arguments import Descriptors, Inside, System, arguments
from mcp_sandbox.backends.bubblewrap.etc import Etc
from mcp_sandbox.backends.bubblewrap.program import Program
from mcp_sandbox.backends.bubblewrap.stage import with_reachable
from mcp_sandbox.models import Limits

Result = TypeVar("Result")

_STATUS_LIMIT_MS = 20_000
_OOM_SCORE = 500
_MEMLOCK_BYTES = 64 * 1024


class NotStarted(Exception):
    """bwrap ended without making a sandbox. Its words are in the log."""


@dataclass(frozen=True)
class Order:
    """Everything that one start needs. `user` is whom bwrap runs as; None leaves it our own."""

    program: Program
    command: Sequence[str]
    inside: Inside
    system: System
    etc: Etc
    filter: bytes
    sources: Mapping[str, Path]
    user: int | None
    log: Path


@dataclass(frozen=True)
class Told:
    """What bwrap said of the sandbox: host numbers of its pid 1 and of its namespaces."""

    launcher: int
    pid: int
    status: Mapping[str, object]


def launch(order: Order, admit: Callable[[Told], Result]) -> Result:
    """Start a sandbox and return what `admit` returns. Blocks.

    `admit` sets its limits before anything runs in it; if it fails, nothing ever does.

    Raises:
        NotStarted: bwrap failed before there was a sandbox.
        OSError: a directory cannot be reached or bwrap cannot be started.
    """
    with ExitStack() as opened:
        status, told_to = _pipe(opened)
        held_by, release = _pipe(opened)
        launcher = with_reachable(
            {"program": order.program.root, **order.sources},
            lambda reach: _start(order, reach, told_to.fileno(), held_by.fileno()),
        )
        # Only bwrap's own end is left: when bwrap ends, reading ends.
        told_to.close()
        try:
            result = admit(_read_status(launcher, status))
            release.write(b"1")
        except BaseException:
            # While the pipe is still open: bwrap takes its end for our leave.
            _abort(launcher)
            raise
        return result


def _pipe(opened: ExitStack) -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return opened.enter_context(FileIO(reader, "r")), opened.enter_context(FileIO(writer, "w"))


def _start(order: Order, reach: Mapping[str, str], status: int, block: int) -> int:
    with ExitStack() as opened:
        etc = {path: _memory_file(opened, data) for path, data in order.etc.files.items()}
        numbers = Descriptors(_memory_file(opened, order.filter), status, block, etc)
        words = arguments(order.inside, order.system, order.etc.bound, numbers, reach)
        # The environment, with the token in it, goes this way: arguments are public.
        given = _memory_file(opened, b"".join(os.fsencode(word) + b"\0" for word in words))
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, log)
        program = f"{reach['program']}/{order.program.inner}"
        return process.start(
            process.Start(
                (program, "--args", str(given), "--", *order.command),
                env={},
                descriptors=(given, numbers.seccomp, status, block, *etc.values()),
                stderr=log,
                user=order.user,
            )
        )


def _memory_file(opened: ExitStack, data: bytes) -> int:
    descriptor = os.memfd_create("mcp-sandbox", os.MFD_CLOEXEC)
    opened.callback(os.close, descriptor)
    with FileIO(descriptor, "w", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_status(launcher: int, status: FileIO) -> Told:
    text = b""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    while b"\n" not in text:
        part = status.read(4096) if poll.poll(_STATUS_LIMIT_MS) else b""
        if not part:
            raise NotStarted("bwrap ended, or said nothing, before it made a sandbox")
        text += part
    # Each document is on a line of its own; the first has the numbers.
    found = json.loads(text.split(b"\n", 1)[0])
    return Told(launcher, int(found["child-pid"]), found)


def _abort(launcher: int) -> None:
    """End bwrap and whatever it started; it is our child, so its number is still its own."""
    for pid in (*process.descendants(launcher), launcher):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(launcher, 0)


def bound(pid: int, limits: Limits, *, memory_by_process: bool) -> None:
    """Set the resource limits of a sandbox's first process, which all others inherit.

    `memory_by_process` limits the data of each process: for machines without a memory group.

    Raises:
        OSError: the process has ended.
    """
    megabyte = 1 << 20
    wanted = {
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.file_mb * megabyte,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: _MEMLOCK_BYTES,
    }
    if memory_by_process:
        # Data, not address space: node reserves far more addresses than it ever uses.
        wanted[resource.RLIMIT_DATA] = limits.memory_mb * megabyte
    for kind, value in wanted.items():
        most = resource.prlimit(pid, kind)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.prlimit(pid, kind, (least, least))
    Path(f"/proc/{pid}/oom_score_adj").write_text(str(_OOM_SCORE))
