"""Starts bwrap as the sandbox's user, holds the sandbox until its limits are set, lets it go.

bwrap tells the process number of the sandbox's pid 1 and then waits for a byte from us: nothing
of the sandbox runs before it is in its control groups.

When the server is root, bwrap must not be, and then cannot walk into the server's private
directories. So one thread joins the sandbox's control groups, moves into a mount namespace of its
own, binds each directory to a short path that everybody can walk, gives up root, starts the
program and ends. The kernel keeps groups, mounts and user for each thread apart, so the server
notices nothing; nothing is mounted on the host, and nothing is left when the server is killed.
"""

import ctypes
import json
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from mcp_sandbox.backends.bubblewrap.arguments import Descriptors, Etc, Inside, System, arguments
from mcp_sandbox.backends.bubblewrap.program import Program
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.runner.processes import kill_trees

Result = TypeVar("Result")

_STATUS_LIMIT_MS = 20_000
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
# In the thread's own namespace this hides the host's /tmp, which the program does not need.
_STAGE = "/tmp"  # noqa: S108
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        launcher = _on_stage(
            {"program": order.program.root, **order.sources},
            order.user,
            order.joined,
            lambda reach: _start(order, reach, (told_to.fileno(), held_by.fileno(), log.fileno())),
        )
        # Only bwrap's own end is left: when bwrap ends, reading ends.
        told_to.close()
        try:
            result = admit(_read_status(launcher, status))
            release.write(b"1")
        except BaseException:
            # While the pipe is still open: bwrap takes its end for our leave. As our child it
            # keeps its number until it is waited for.
            kill_trees([launcher])
            os.waitpid(launcher, 0)
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
        with subprocess.Popen(  # noqa: S603 - a fixed program by its whole path, without a shell
            (program, "--args", str(given), "--", *order.command),
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(given, filter_, status, block, order.starter, *etc.values()),
            start_new_session=True,
        ) as child:
            # It is meant to outlive us: without an exit code the object would wait for it here.
            child.returncode = 0
            return child.pid


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


# setgroups, setresgid, setresuid
_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
_libc = ctypes.CDLL(None, use_errno=True)


def _on_stage(
    sources: Mapping[str, Path],
    user: int | None,
    joined: tuple[str, ...],
    action: Callable[[Mapping[str, str]], int],
) -> int:
    """Run `action` with a path for each source, at which the sandbox's user can reach it. Blocks.

    `user` is None when the server is not root. `joined` are of version 1, which take one thread.

    Raises:
        BackendUnavailable: root here may not make mount namespaces.
        OSError: a source is missing or is a link, or `action` raised it.
    """
    if user is None:
        return action({name: str(path) for name, path in sources.items()})

    def run() -> int:
        for group in joined:
            # Moving only the thread that asks spares the kernel a wait for all others.
            Path(group, "tasks").write_text("0")
        reach = _bind(sources)
        _become(user)
        return action(reach)

    # A thread of its own, new each time: what it gave up and where it moved is for good.
    with ThreadPoolExecutor(1, "mcp-sandbox-stage") as thread:
        return thread.submit(run).result()


def _bind(sources: Mapping[str, Path]) -> dict[str, str]:
    if _libc.unshare(_CLONE_FS | _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise BackendUnavailable(
            f"root may not make a mount namespace here ({os.strerror(number)}): a container "
            "around this server forbids it. Start that container with --privileged, or run the "
            "server as an ordinary user, or on the host"
        )
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    with ExitStack() as opened:
        descriptors: dict[str, int] = {}
        for name, path in sources.items():
            descriptors[name] = os.open(path, _DIRECTORY)
            opened.callback(os.close, descriptors[name])
        _mount("stage", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0711,size=64k")
        return {name: _show(name, sources[name], descriptors[name]) for name in sources}


def _show(name: str, path: Path, descriptor: int) -> str:
    target = f"{_STAGE}/{name}"
    Path(target).mkdir(mode=0o755)
    # What is mounted on the stage's own place is the stage.
    deep = 0 if path == Path(_STAGE) else _MS_REC
    _mount(f"/proc/thread-self/fd/{descriptor}", target, None, _MS_BIND | deep, None)
    return target


def _become(user: int) -> None:
    """Give up root in this thread alone: the C library's own functions would do it in all."""
    arguments = ((0, None), (user, user, user), (user, user, user))
    for call, given in zip(_CALLS[os.uname().machine], arguments, strict=True):
        if _libc.syscall(call, *given) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot become the sandbox's user: {os.strerror(number)}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), options and options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount for the sandbox: {os.strerror(number)}", target)
