"""Connects to a runner's unix socket in a directory that user code can write to.

The socket is opened beneath the directory without following links and reached through its file
descriptor, so a planted link never leads to another socket of the host, and a path longer than
the 108 bytes of a socket address works. That the runner is the one listening is proved later, by
the token; nothing here trusts the other side.
"""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import ByteStream

from mcp_sandbox.backends.socket_stream import SocketStream
from mcp_sandbox.errors import SandboxGone

_RETRY_S = 0.001


async def connect(
    directory: Path,
    name: str = "runner.sock",
    *,
    deadline_s: float,
    has_ended: Callable[[], bool] = lambda: False,
) -> ByteStream:
    """Wait until the socket `name` in `directory` accepts a connection, and open one.

    `has_ended` tells that waiting is in vain: nobody is left who could listen.

    Raises:
        SandboxGone: it does not within `deadline_s`, or something else took its place.
    """
    connected = None
    with anyio.move_on_after(deadline_s):
        while True:
            connected = _try_connect(directory, name)
            if connected is not None or has_ended():
                break
            # The file appears at bind, but nothing on the host tells of listen.
            await anyio.sleep(_RETRY_S)
    if connected is None:
        how = "has ended" if has_ended() else f"did not listen on {name} within {deadline_s:g} s"
        raise SandboxGone(f"the runner {how}; the next call starts a new sandbox on the same files")
    return SocketStream(connected)


async def wait_until_bound(
    directory: Path, name: str = "runner.sock", *, has_ended: Callable[[], bool]
) -> bool:
    """Wait, without limit, until the socket `name` is in `directory`; False when it never will.

    Raises:
        SandboxGone: something else took its place.
    """
    while True:
        found = _open_socket(directory, name)
        if found is not None:
            os.close(found)
            return True
        if has_ended():
            return False
        await anyio.sleep(_RETRY_S)


def _try_connect(directory: Path, name: str) -> socket.socket | None:
    """A connected non-blocking socket, or None when nobody accepts yet."""
    target = _open_socket(directory, name)
    if target is None:
        return None
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.setblocking(False)
        client.connect(f"/proc/self/fd/{target}")
    except (ConnectionRefusedError, BlockingIOError):
        client.close()
        return None
    except BaseException:
        client.close()
        raise
    finally:
        os.close(target)
    return client


def _open_socket(directory: Path, name: str) -> int | None:
    """A path descriptor of the socket, or None when it is not there yet."""
    try:
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise SandboxGone(
            f"the socket directory {directory} is gone; the next call starts a new sandbox"
        ) from exc
    except NotADirectoryError as exc:
        raise SandboxGone(
            f"the socket directory {directory} is not a directory any more; "
            "the next call starts a new sandbox"
        ) from exc
    try:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    finally:
        os.close(folder)
    if stat.S_ISSOCK(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise SandboxGone(
        f"{name} in {directory} is not a socket: code in the sandbox replaced it; "
        "the next call starts a new sandbox on the same files"
    )
