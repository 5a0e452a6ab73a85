"""The C halves of `signal`, `socket` and `json`, with the few Python parts that are needed.

The Python halves load enum, re, functools and selectors: longer than the rest of the runner, in
every sandbox, twice (pid 1 and the warm interpreter).
"""

from __future__ import annotations

import _json
import _socket
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal

__all__ = ["signal"]  # Names defined here need no mention.

Socket = _socket.socket
CONTROL_FD = 3  # A worker's or interpreter's socket to pid 1.
MOST_FDS = 65536


class _Rules:
    """How JSON is read: strictly, without NaN."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    memo: dict[str, str] = {}  # noqa: RUF012 - read by the C scanner only

    @staticmethod
    def parse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")


def _unknown(value: object) -> None:
    raise TypeError(f"{type(value).__name__} cannot be put into JSON")


_scan = _json.make_scanner(_Rules())  # type: ignore[arg-type]
_encode = _json.make_encoder(
    None, _unknown, _json.encode_basestring_ascii, None, ":", ",", False, False, False
)


def dumps(value: object) -> bytes:
    """Compact ASCII JSON; lone surrogates are escaped and so survive."""
    return "".join(_encode(value, 0)).encode("ascii")


def loads(data: bytes) -> Any:  # noqa: ANN401 - whatever the JSON holds
    """Parse a JSON text without space around it; ValueError or RecursionError if it is none."""
    text = data.decode("utf-8")
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError) as exc:
        # Some versions have no error of their own to raise until `json.decoder` is loaded.
        raise ValueError(f"no JSON value: {exc}") from exc
    if end != len(text):
        raise ValueError(f"more than one JSON value: something follows at character {end}")
    return value


def make_socket_pair() -> tuple[Socket, Socket]:
    """Return two connected sockets that keep messages apart and that no child inherits."""
    return _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)


def send(sock: Socket, message: dict[str, Any], fds: list[int]) -> None:
    """Send one message, with descriptors for the other side."""
    rights = struct.pack(f"{len(fds)}i", *fds)
    extra = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
    sock.sendmsg([dumps(message)], extra)


def receive(
    sock: Socket, size: int, most_fds: int = 0, *, wait: bool = True
) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors; None when the other side is gone.

    Raises:
        ConnectionError: the other side was killed.
        there is no message now, and `wait` is false.
    """
    room = _socket.CMSG_SPACE(most_fds * 4) if most_fds else 0
    flags = _socket.MSG_CMSG_CLOEXEC | (0 if wait else _socket.MSG_DONTWAIT)
    data, extra, _, _ = sock.recvmsg(size, room, flags)
    fds: list[int] = []
    for level, kind, rights in extra:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(rights) // 4}i", rights)
    return loads(data) if data else None, fds


def close(fds: list[int]) -> None:
    """Close these descriptors and clear the list: their numbers may be used again."""
    while fds:
        os.close(fds.pop())


def wait_for(sock: Socket) -> bool:
    """Wait for a message without taking it; False when the other side is gone."""
    return bool(sock.recv(1, _socket.MSG_PEEK))


def listen(path: str) -> Socket:
    """Return a listening, non-blocking unix socket."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    listener.bind(path)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def begin(starter: str | None, path: str) -> Socket:
    """Return a listening socket, or one of the `starter` through which that will come."""
    if starter is None:
        return listen(path)
    if starter.isdigit():
        # Inherited: the other end waits until there are limits, and this process can be seen.
        os.set_inheritable(int(starter), False)
        os.write(int(starter), b"1")
        return _socket.socket(fileno=int(starter))
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(starter)
    return line


def take_over(line: Socket) -> tuple[str, Socket]:
    """Return the token and the socket to listen on, from the server that starts this runner."""
    given, fds = receive(line, 1024, 1)
    if not given:
        raise SystemExit("the server that started this runner has ended")
    line.close()
    return given["token"], _socket.socket(fileno=fds[0])


def accept(listener: Socket) -> Socket:
    """Accept the next connection; OSError if there is none, or no descriptor is left for it."""
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - the C method
    return _socket.socket(fileno=fd)
