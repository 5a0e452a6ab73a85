"""Starts bwrap, holds the new sandbox until its limits are set, and lets it go.

bwrap tells the process number of the sandbox's pid 1 and then waits for a byte from us: nothing
of the sandbox runs before it is in its control groups.
"""

import json
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from mcp_sandbox.backends import process
from mcp_sandbox.backends.bubblewrap import stage
from mcp_sandbox.backends.bubblewrap.arguments import Descriptors, Inside, System, arguments
from mcp_sandbox.backends.bubblewrap.etc import Etc
from mcp_sandbox.backends.bubblewrap.program import Program
from mcp_sandbox.backends.bubblewrap.stage import Stage

Result = TypeVar("Result")

_STATUS_LIMIT_MS = 20_000


class NotStarted(Exception):
    """bwrap ended without making a sandbox. Its words are in the log."""


@dataclass(frozen=True)
class Order:
    """Everything that one start needs. `user` is whom bwrap runs as; None leaves it our own.

    `starter` is the descriptor through which the runner gets its token and says that it listens.
    `joined` are control groups that bwrap itself is started in.
    """

    program: Program
    command: Sequence[str]
    inside: Inside
    system: System
    etc: Etc
    filter: bytes
    starter: int
    sources: Mapping[str, Path]
    user: int | None
    joined: tuple[str, ...]
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
        # Opened here: where bwrap is started, the data root may be out of sight.
        log = opened.enter_context(order.log.open("ab"))
        sources = {"program": order.program.root, **order.sources}
        launcher = stage.on(
            Stage(sources, order.user, order.joined),
            lambda reach: _start(order, reach, (told_to.fileno(), held_by.fileno(), log.fileno())),
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


def _start(order: Order, reach: Mapping[str, str], ends: tuple[int, int, int]) -> int:
    status, block, log = ends
    with ExitStack() as opened:
        etc = {path: _memory_file(opened, data) for path, data in order.etc.files.items()}
        filter_ = _memory_file(opened, order.filter)
        numbers = Descriptors(filter_, status, block, order.starter, etc)
        words = arguments(order.inside, order.system, order.etc.bound, numbers, reach)
        # The environment goes this way: arguments are public.
        given = _memory_file(opened, b"".join(os.fsencode(word) + b"\0" for word in words))
        program = f"{reach['program']}/{order.program.inner}"
        return process.start(
            process.Start(
                (program, "--args", str(given), "--", *order.command),
                env={},
                descriptors=(given, filter_, status, block, order.starter, *etc.values()),
                stderr=log,
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
