"""Joins its input and output to a unix socket.

    relay.py [--lines] [--secret PIPE] [--announce] SOCKET [SECONDS]

Standard library only, Python 3.9 or newer, imports no other file. It waits up to SECONDS for
the socket to accept. With --announce, for use inside a sandbox, it says so on standard error and
ignores other programs' signals. The end of standard input is passed on as a half-close; the relay
ends when the other side of the socket does. A slow reader slows the writer. With --lines the output
is lines of base64, for who takes text only. With --secret the first line of the input goes to the
pipe at which the runner waits for it.
"""

import binascii
import ctypes
import errno
import os
import sys
import time
from _thread import start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable
    from typing import TypeVar

    Other = TypeVar("Other")
else:
    # Their C halves: the Python halves load for longer than all else here.
    import _signal as signal
    import _socket as socket

_NOT_YET = (errno.ENOENT, errno.ECONNREFUSED, errno.ENXIO)
CHUNK = 256 * 1024
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15


def connect(path: str) -> socket.socket:
    """Return a connection to the socket at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def await_other(reach: "Callable[[str], Other]", path: str, seconds: float) -> "Other":
    """Return what `reach` returns, waiting until somebody listens at `path`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return reach(path)
        except OSError as exc:
            if exc.errno not in _NOT_YET or time.monotonic() >= deadline:
                raise
        time.sleep(0.005)


def hand_over(path: str, seconds: float) -> None:
    """Write the first line of standard input to the pipe at `path`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise OSError(errno.EPIPE, "no secret came")
        line += byte
    pipe = await_other(lambda path: os.open(path, os.O_WRONLY | os.O_NONBLOCK), path, seconds)
    os.write(pipe, line)
    os.close(pipe)


def send_input(connection: socket.socket) -> None:
    """Copy standard input to the socket, then half-close it."""
    try:
        while data := os.read(0, CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return  # The socket is gone: the other direction sees that and ends the process.


def write_output(connection: socket.socket, as_lines: bool) -> None:
    """Copy the socket to standard output until either of them ends."""
    while data := connection.recv(CHUNK):
        data = binascii.b2a_base64(data) if as_lines else data
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def main(arguments: "list[str]") -> int:
    """Run the relay; returns its exit code."""
    # Before anything else: what passes through here is not for other processes of this user.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    as_lines = arguments[:1] == ["--lines"]
    arguments = arguments[as_lines:]
    pipe = arguments[1] if arguments[:1] == ["--secret"] else ""
    arguments = arguments[2:] if pipe else arguments
    announce = arguments[:1] == ["--announce"]
    path, *rest = arguments[1:] if announce else arguments
    seconds = float(rest[0]) if rest else 0.0
    try:
        if pipe:
            hand_over(pipe, seconds)
        connection = await_other(connect, path, seconds)
    except OSError as exc:
        os.write(2, f"relay: cannot connect to {path}: {exc.strerror}\n".encode())
        return 1
    if announce:
        # Inside a sandbox a stray `pkill python` of the user must not mean the relay.
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"mcp-sandbox", 0, 0, 0)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.write(2, b"connected\n")
    start_new_thread(send_input, (connection,))
    try:
        write_output(connection, as_lines)
    except (ConnectionResetError, BrokenPipeError):
        return 1
    return 0


if __name__ == "__main__":
    # The input thread may be blocked in a read: leave without waiting for it.
    os._exit(main(sys.argv[1:]))
