"""Starts bwrap as the sandbox's user, and holds the sandbox until its limits are set.

bwrap reports the process number of the sandbox's pid 1 and then waits for a byte from the server:
no code of the sandbox runs before it is in its control groups.

If the server is root, bwrap runs as another user, who cannot enter the server's private
directories. So one thread joins the sandbox's control groups, moves into a mount namespace of its
own, binds each directory to a short path that every user can enter, gives up root, starts bwrap and
ends. The kernel keeps groups, mounts and user per thread, so the server is not affected; nothing is
mounted on the host, and nothing is left if the server is killed.
"""

import ctypes
import json
import os
import select
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TypeVar

from mcp_sandbox.backends.bubblewrap.arguments import (
    Descriptors,
    Etc,
    SandboxLayout,
    arguments,
    list_sources,
    make_etc,
)
from mcp_sandbox.backends.bubblewrap.host import Host
from mcp_sandbox.backends.bubblewrap.verify import BwrapStatus
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.runner.kernel.processes import kill_trees

Result = TypeVar("Result")

_STATUS_LIMIT_MS = 20_000
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
# In the thread's own mount namespace this hides the host's /tmp, which bwrap does not need.
_STAGE = "/tmp"  # noqa: S108
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotStarted(Exception):
    """bwrap ended without making a sandbox. Its messages are in the log."""


def launch(
    host: Host,
    inside: SandboxLayout,
    directory: Path,
    joined: tuple[str, ...],
    starter: int,
    admit: Callable[[BwrapStatus], Result],
) -> Result:
    """Start a sandbox with its run directory and return what `admit` returns. Blocks.

    `joined` are control groups that bwrap itself is started in. Through the descriptor `starter`
    the runner says that it runs and gets what it serves with. `admit` sets the sandbox's limits
    before any of its code runs; if `admit` fails, none runs.

    Raises:
        NotStarted: bwrap failed before there was a sandbox.
        OSError: a directory cannot be reached or bwrap cannot be started.
    """
    with ExitStack() as opened:
        status, told_to = _pipe(opened)
        held_by, release = _pipe(opened)
        # Opened here: the thread that starts bwrap may not see the data root.
        log = opened.enter_context((directory / "log").open("ab"))
        ends = (told_to.fileno(), held_by.fileno(), starter, log.fileno())
        made = (
            make_etc(inside.uid, inside.gid, inside.spec.network) if inside.walls else Etc({}, ())
        )
        launcher = _on_stage(
            {"program": host.program.root, **list_sources(inside, host.runner)},
            inside.uid if host.is_root else None,
            joined,
            lambda reach: _start(host, inside, made, reach, ends),
        )
        # Only bwrap has the writing end now: when bwrap ends, reading ends.
        told_to.close()
        try:
            result = admit(_read_status(launcher, status))
            release.write(b"1")
        except BaseException:
            # Before the pipe is closed, as bwrap would then go on. A child keeps its process
            # number until it is waited for.
            kill_trees([launcher])
            os.waitpid(launcher, 0)
            raise
        return result


def _pipe(opened: ExitStack) -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return opened.enter_context(FileIO(reader, "r")), opened.enter_context(FileIO(writer, "w"))


def _start(
    host: Host,
    inside: SandboxLayout,
    made: Etc,
    reach: Mapping[str, str],
    ends: tuple[int, int, int, int],
) -> int:
    status, block, starter, log = ends
    with ExitStack() as opened:
        files = {path: _memory_file(opened, data) for path, data in made.files.items()}
        filter_ = _memory_file(opened, host.filter)
        numbers = Descriptors(filter_, status, block, starter, files)
        words = arguments(inside, host.system, made.bound, numbers, reach)
        # Through a file, because arguments are public and these hold the environment.
        given = _memory_file(opened, b"".join(os.fsencode(word) + b"\0" for word in words))
        program = f"{reach['program']}/{host.program.inner}"
        with subprocess.Popen(  # noqa: S603 - a fixed program by its whole path, without a shell
            (program, "--args", str(given), "--", *host.command),
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(given, filter_, status, block, starter, *files.values()),
            start_new_session=True,
        ) as child:
            # It may outlive the server: without an exit code the object would wait for it here.
            child.returncode = 0
            return child.pid


def _memory_file(opened: ExitStack, data: bytes) -> int:
    descriptor = os.memfd_create("mcp-sandbox", os.MFD_CLOEXEC)
    opened.callback(os.close, descriptor)
    with FileIO(descriptor, "w", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_status(launcher: int, status: FileIO) -> BwrapStatus:
    text = b""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    while b"\n" not in text:
        part = status.read(4096) if poll.poll(_STATUS_LIMIT_MS) else b""
        if not part:
            raise NotStarted("bwrap ended or took too long before it made a sandbox")
        text += part
    # Each document is on a line of its own; the first has the numbers.
    found = json.loads(text.split(b"\n", 1)[0])
    return BwrapStatus(launcher, int(found["child-pid"]), found)


# setgroups, setresgid, setresuid
_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
_libc = ctypes.CDLL(None, use_errno=True)


def _on_stage(
    sources: Mapping[str, Path],
    user: int | None,
    joined: tuple[str, ...],
    action: Callable[[Mapping[str, str]], int],
) -> int:
    """Run `action` with a path to each source that the sandbox's user can reach. Blocks.

    `user` is None if the server is not root. `joined` are of version 1: one thread can join them.

    Raises:
        BackendUnavailable: root here may not make mount namespaces.
        OSError: a source is missing or is a link, or `action` raised it.
    """
    if user is None:
        return action({name: str(path) for name, path in sources.items()})

    def run() -> int:
        for group in joined:
            # To move this thread only is fast: the kernel need not wait for the others.
            Path(group, "tasks").write_text("0")
        reach = _bind(sources)
        _become(user)
        return action(reach)

    # A new thread each time: it cannot get root or its old namespace back.
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
        for name, descriptor in descriptors.items():
            Path(_STAGE, name).mkdir(mode=0o755)
            # Not recursive for /tmp itself: the new tmpfs is mounted on it.
            flags = _MS_BIND | (0 if sources[name] == Path(_STAGE) else _MS_REC)
            _mount(f"/proc/thread-self/fd/{descriptor}", f"{_STAGE}/{name}", None, flags, None)
    return {name: f"{_STAGE}/{name}" for name in sources}


def _become(user: int) -> None:
    """Give up root in this thread only; the C library's functions would do it in all threads."""
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
