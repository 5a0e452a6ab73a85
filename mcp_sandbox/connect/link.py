"""One connection to the daemon: dialled, its owner checked, greeted."""

import os
import sys

# What `socket` is made of. Its enumerations would double the time that the relay takes to start.
from _socket import AF_UNIX, MSG_PEEK, SHUT_WR, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from mcp_sandbox.connect.place import Place, say

CHUNK_BYTES = 256 << 10
ANSWER_S = 15.0
_LONGEST_ANSWER = 64 << 10
_CREDENTIAL_BYTES = 12


class Unavailable(Exception):
    """No daemon can be used; the message says why and what to do."""


class NotRunning(Unavailable):
    """Nobody listens."""


class Link:
    """A connection whose other side has accepted us. `version` is the daemon's."""

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self.version = ""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, data: bytes | memoryview) -> int:
        """Send what fits; BlockingIOError when nothing does."""
        return self._connection.send(data)

    def send_all(self, data: bytes) -> None:
        """Send everything, within ANSWER_S."""
        self._connection.settimeout(ANSWER_S)
        self._connection.sendall(data)
        self._connection.setblocking(False)

    def receive(self) -> bytes:
        """Return what has come, nothing when the other side has ended; else BlockingIOError."""
        return self._connection.recv(CHUNK_BYTES)

    def receive_line(self) -> bytes:
        """Return the next short line, within ANSWER_S; what follows it stays in the socket.

        Raises:
            EOFError: the other side ended before the end of the line, or the line is too long.
        """
        self._connection.settimeout(ANSWER_S)
        line = bytearray()
        # Byte by byte would be slow; so look first, then take only the line.
        while len(line) <= _LONGEST_ANSWER:
            seen = self._connection.recv(4096, MSG_PEEK)
            end = seen.find(b"\n") + 1
            line += self._connection.recv(end or len(seen))
            if end or not seen:
                break
        self._connection.setblocking(False)
        if not line.endswith(b"\n"):
            raise EOFError
        return bytes(line)

    def end_sending(self) -> None:
        self._connection.shutdown(SHUT_WR)

    def close(self) -> None:
        self._connection.close()


def dial(place: Place, greeting: bytes | None = None) -> Link:
    """Connect and greet.

    Raises:
        NotRunning: nobody listens there, or ended just now.
        Unavailable: it cannot be reached, is not ours, or refuses us.
    """
    connection = socket(AF_UNIX, SOCK_STREAM)
    try:
        return _greeted(connection, place, greeting or place.greeting)
    except BaseException:
        connection.close()
        raise


def _greeted(connection: socket, place: Place, greeting: bytes) -> Link:
    connection.settimeout(ANSWER_S)
    link = Link(connection)
    try:
        connection.connect(place.socket)
        _check_owner(connection, place)
        link.send_all(greeting)
        answer = link.receive_line()
    except (FileNotFoundError, ConnectionError, EOFError) as exc:
        raise NotRunning(f"no sandbox server is running at {place.socket}") from exc
    except TimeoutError as exc:
        raise Unavailable(
            f"the sandbox server at {place.socket} does not answer; end it with `mcp-sandbox "
            "shutdown` or kill it, and try again"
        ) from exc
    except OSError as exc:
        raise Unavailable(
            f"cannot connect to {place.socket}: {exc.strerror or exc}; give another path with "
            "--socket or MCP_SANDBOX_SOCKET"
        ) from exc
    link.version = _accepted(answer, place)
    return link


def _check_owner(connection: socket, place: Place) -> None:
    """Refuse a socket that another user has put there: it would read everything that we send."""
    credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIAL_BYTES)
    uid = int.from_bytes(credentials[4:8], sys.byteorder)
    if uid not in (0, os.geteuid()):
        raise Unavailable(
            f"{place.socket} belongs to another user (uid {uid}); give another path with --socket "
            "or MCP_SANDBOX_SOCKET"
        )


def _accepted(line: bytes, place: Place) -> str:
    # The usual answer is known by its beginning: json would take longer to load than it to come.
    usual = line.startswith(f'{{"ok": true, "version": "{place.version}",'.encode())
    if usual and b'"notice"' not in line:
        return place.version
    import json

    try:
        answer = json.loads(line)
        if answer["ok"] is True:
            if "notice" in answer:
                say(str(answer["notice"]))
            return str(answer["version"])
        problem = f"the sandbox server refused: {answer['error']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        problem = (
            f"what listens at {place.socket} is not a sandbox server; give another path with "
            "--socket or MCP_SANDBOX_SOCKET"
        )
    raise Unavailable(problem)
