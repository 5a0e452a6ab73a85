"""Shows directories that only root can reach to a program that is not root any more.

bwrap is started as the sandbox's user, who cannot walk into the server's private directories.
So one thread moves into a mount namespace of its own, binds each directory to a short path that
everybody can walk, starts the program from there and ends. The namespace ends with the program's
need of it: nothing is mounted on the host, and nothing is left when the server is killed.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from mcp_sandbox.errors import BackendUnavailable

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
# In the thread's own namespace this hides the host's /tmp, which the program does not need.
_STAGE = "/tmp"  # noqa: S108

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def with_reachable(sources: Mapping[str, Path], action: Callable[[Mapping[str, str]], int]) -> int:
    """Run `action` with a path for each source; in a stage when this process is root. Blocks.

    Raises:
        BackendUnavailable: root here may not make mount namespaces.
        OSError: a source is missing or is a link, or `action` raised it.
    """
    if os.geteuid() != 0:
        return action({name: str(path) for name, path in sources.items()})
    # A thread of its own, new each time: a namespace that was entered cannot be left.
    with ThreadPoolExecutor(1, "mcp-sandbox-stage") as thread:
        return thread.submit(lambda: action(_stage(sources))).result()


def _stage(sources: Mapping[str, Path]) -> dict[str, str]:
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
