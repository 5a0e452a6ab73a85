"""Starts a program as the sandbox's user, from a thread that has changed into that user.

When the server is root, bwrap must not be, and then cannot walk into the server's private
directories. So one thread joins the sandbox's control groups, moves into a mount namespace of its
own, binds each directory to a short path that everybody can walk, gives up root, starts the
program and ends. The kernel keeps groups, mounts and user for each thread apart, so the server
notices nothing; nothing is mounted on the host, and nothing is left when the server is killed.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.errors import BackendUnavailable

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
# In the thread's own namespace this hides the host's /tmp, which the program does not need.
_STAGE = "/tmp"  # noqa: S108

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Calls(NamedTuple):
    setgroups: int
    setresgid: int
    setresuid: int


_CALLS = {"x86_64": _Calls(116, 119, 117), "aarch64": _Calls(159, 149, 147)}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Stage:
    """What a program is started in. `user` is None when the server is not root.

    `joined` are control groups of version 1, which take a single thread.
    """

    sources: Mapping[str, Path]
    user: int | None
    joined: tuple[str, ...] = ()


def on(stage: Stage, action: Callable[[Mapping[str, str]], int]) -> int:
    """Run `action` with a path for each source, at which the sandbox's user can reach it. Blocks.

    Raises:
        BackendUnavailable: root here may not make mount namespaces.
        OSError: a source is missing or is a link, or `action` raised it.
    """
    user = stage.user
    if user is None:
        return action({name: str(path) for name, path in stage.sources.items()})

    def run() -> int:
        for group in stage.joined:
            # Moving only the thread that asks spares the kernel a wait for all others.
            Path(group, "tasks").write_text("0")
        reach = _bind(stage.sources)
        _become(user)
        return action(reach)

    # A thread of its own, new each time: what it gave up and where it moved is for good.
    with ThreadPoolExecutor(1, "mcp-sandbox-stage") as thread:
        return thread.submit(run).result()


def _bind(sources: Mapping[str, Path]) -> dict[str, str]:
    _own_namespace()
    with ExitStack() as opened:
        descriptors: dict[str, int] = {}
        for name, path in sources.items():
            descriptors[name] = os.open(path, _DIRECTORY)
            opened.callback(os.close, descriptors[name])
        _mount("stage", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0711,size=64k")
        return {name: _show(name, descriptor) for name, descriptor in descriptors.items()}


def _show(name: str, descriptor: int) -> str:
    target = f"{_STAGE}/{name}"
    Path(target).mkdir(mode=0o755)
    _mount(f"/proc/thread-self/fd/{descriptor}", target, None, _MS_BIND | _MS_REC, None)
    return target


def _become(user: int) -> None:
    """Give up root in this thread alone: the C library's own functions would do it in all."""
    calls = _CALLS[os.uname().machine]
    _check(_libc.syscall(calls.setgroups, 0, None))
    _check(_libc.syscall(calls.setresgid, user, user, user))
    _check(_libc.syscall(calls.setresuid, user, user, user))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot become the sandbox's user: {os.strerror(number)}")


def _own_namespace() -> None:
    if _libc.unshare(_CLONE_FS | _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise BackendUnavailable(
            f"root may not make a mount namespace here ({os.strerror(number)}): a container "
            "around this server forbids it. Start that container with --privileged, or run the "
            "server as an ordinary user, or on the host"
        )
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), options and options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount for the sandbox: {os.strerror(number)}", target)
