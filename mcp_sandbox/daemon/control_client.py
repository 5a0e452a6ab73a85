"""The command line's side of the socket: one command to the daemon, its events and its result."""

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mcp_sandbox.daemon.acceptor import PROTOCOL
from mcp_sandbox.errors import NoDaemon, OperatorError

JsonObject = Mapping[str, Any]

# The longest event of an agent, 32 MiB, grows at most threefold in this JSON.
_MAX_LINE = 128 << 20


class ControlCall:
    """A command under way. `daemon` is the daemon's answer: its version and process number."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rest = bytearray()
        """Bytes received after the last message."""
        self.daemon = self.receive()
        if not self.daemon.get("ok"):
            raise OperatorError(str(self.daemon.get("error")))

    def receive(self) -> JsonObject:
        """Return the next message.

        Raises:
            OperatorError: the message says that the command failed.
            NoDaemon: the daemon hung up.
        """
        seen = 0
        while (end := self.rest.find(b"\n", seen)) < 0:
            seen, data = len(self.rest), b""
            with suppress(ConnectionError):
                data = self.connection.recv(64 << 10)
            if not data or len(self.rest) > _MAX_LINE:
                raise NoDaemon("the daemon ended before it had answered: see `mcp-sandbox logs`")
            self.rest += data
        message: JsonObject = json.loads(self.rest[:end])
        del self.rest[: end + 1]
        if "error" in message:
            raise OperatorError(str(message["error"]))
        return message


@contextmanager
def open_control_call(path: Path, command: str, arguments: JsonObject) -> Generator[ControlCall]:
    """Give the daemon at `path` a command.

    Raises:
        NoDaemon: no daemon answers there.
        OperatorError: the daemon refuses.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        # An error in the block, such as a closed pipe, is not the daemon's fault.
        hello = {"role": "control", "command": command, "arguments": arguments}
        yield _begin_call(connection, path, json.dumps({"mcp-sandbox": PROTOCOL, **hello}).encode())


def _begin_call(connection: socket.socket, path: Path, greeting: bytes) -> ControlCall:
    # A daemon that has just started may answer late; one that is stuck never answers.
    connection.settimeout(30)
    try:
        connection.connect(str(path))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        # Commands go only to a daemon of the same user.
        if os.geteuid() not in (0, uid):
            raise OperatorError(
                f"{path} belongs to a daemon of the user with uid {uid}, not to yours"
            )
        connection.sendall(greeting + b"\n")
        begun = ControlCall(connection)
    except TimeoutError as exc:
        raise NoDaemon(
            f"the daemon on {path} does not answer: end it with `kill`, and try again"
        ) from exc
    except (FileNotFoundError, ConnectionError) as exc:
        raise NoDaemon(
            f"no daemon runs here (none listens on {path}): start one with `mcp-sandbox "
            "serve`, or it starts with your agent"
        ) from exc
    except OSError as exc:
        raise NoDaemon(f"the socket {path} cannot be used: {exc.strerror or exc}") from exc
    connection.settimeout(None)
    return begun


def ask_daemon(
    path: Path,
    command: str,
    *,
    on_event: Callable[[JsonObject], None] = lambda _event: None,
    data: bytes = b"",
    **arguments: object,
) -> JsonObject:
    """Send a command, then `data`, and return its result; `on_event` gets the events before it.

    Raises as `open_control_call`, and OperatorError if the command failed. After KeyboardInterrupt
    the
    command is ended first.
    """
    with open_control_call(path, command, arguments) as talk:
        try:
            # If the daemon has refused already, its message is read below.
            with suppress(ConnectionError):
                talk.connection.sendall(data)
            while "result" not in (message := talk.receive()):
                on_event(message["event"])
        except KeyboardInterrupt:
            with suppress(OperatorError, OSError):
                talk.connection.shutdown(socket.SHUT_WR)
                while True:
                    talk.receive()
            raise
        result: JsonObject = message["result"]
        return result


def shut_down(path: Path, *, timeout_s: float) -> int:
    """Ask the daemon to end, wait until it has ended, and return its process number.

    Raises:
        NoDaemon: no daemon answers at `path`.
        OperatorError: it has not ended within `timeout_s`.
    """
    with open_control_call(path, "shutdown", {}) as talk:
        pid = int(talk.daemon["pid"])
        process = os.pidfd_open(pid)
        try:
            talk.receive()
            if not select.select([process], [], [], timeout_s)[0]:
                raise OperatorError(
                    f"the daemon (pid {pid}) has not ended within {timeout_s:g} s: end it with "
                    f"`kill -9 {pid}`; no file is lost"
                )
        finally:
            os.close(process)
        return pid
