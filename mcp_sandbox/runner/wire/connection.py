"""A connection to the server: the proof of the token, then frames into calls and replies."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.kernel.loop import READ, WRITE
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runner.wire.protocol import OpError, ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, Protocol

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.kernel.native import Socket

    class OpenCall(Protocol):
        """What receives the frames of a call."""

        def feed(self, data: bytes, *, more: bool) -> None: ...
        def credit(self, size: int) -> None: ...
        def cancel(self) -> None: ...

    class Owner(Protocol):
        """The server, as its connections know it."""

        token: bytes
        loop: Loop
        used_at: float

        def describe(self) -> dict[str, Any]: ...
        def proved(self, connection: Connection) -> None: ...
        def closed(self, connection: Connection) -> None: ...
        def open_call(
            self, connection: Connection, reply: Reply, header: dict[str, Any], body: bytes
        ) -> None: ...
        def release(self, call: OpenCall) -> None: ...


_HANDSHAKE_S = 5.0


class Reply:
    """Frames of one call; silent once the call has ended."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection: Connection | None = connection
        self._number = number

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def data(self, name: str, data: bytes) -> None:
        if self._connection:
            self._connection.send({"t": "data", "id": self._number, "s": name}, data)

    def opened(self, most: int = 0, port: int = 0) -> None:
        if self._connection:
            self._connection.send({"t": "open", "id": self._number, "most": most, "port": port})

    def credit(self, size: int) -> None:
        if self._connection:
            self._connection.send({"t": "credit", "id": self._number, "n": size})

    def done(self, result: dict[str, Any], payload: bytes = b"") -> None:
        self._end({"t": "done", "id": self._number, "result": result}, payload)

    def fail(self, code: str, message: str) -> None:
        self._end({"t": "fail", "id": self._number, "code": code, "message": message}, b"")

    def _end(self, header: dict[str, Any], payload: bytes) -> None:
        # Silent first: sending may find the peer gone, which ends all calls.
        connection, self._connection = self._connection, None
        if connection:
            connection.send(header, payload)
            connection.ended(self._number)


class Connection:
    """A peer that is not trusted until it has proved the token."""

    def __init__(self, server: Owner, sock: Socket) -> None:
        self._server = server
        self._loop = server.loop
        self._sock = sock
        self._out = bytearray()
        self._decoder = protocol.Decoder()
        self._seal: protocol.Seal | None = None
        self._nonce = os.urandom(protocol.NONCE_BYTES)
        self.calls: dict[int, OpenCall] = {}
        self._owed: dict[int, int] = {}
        self.proved = False
        self.for_doors = False
        # The peer will close soon, and is not counted as connected any more.
        self.leaving = False
        self._blocked = False
        sock.setblocking(False)
        self._watch(READ)
        self._deadline = self._loop.call_later(_HANDSHAKE_S, self.close)
        self.send({"t": "hello", "version": protocol.VERSION, "nonce": self._nonce.hex()})

    def _watch(self, events: int) -> None:
        self._loop.watch(self._sock.fileno(), events, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and self._sock.fileno() >= 0:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(protocol.CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for header, payload in self._decoder.feed(data):
                if self._sock.fileno() < 0:
                    return
                self._frame(header, payload)
        except (ProtocolError, KeyError, TypeError, ValueError, OSError) as exc:
            # Say why, as far as the socket takes it, and hang up: only this connection is lost.
            self.send({"t": "broken", "message": f"{type(exc).__name__}: {exc}"[:500]})
            self.close()

    def _frame(self, header: dict[str, Any], payload: bytes) -> None:
        if not self.proved:
            self._greet(header)
            return
        number = header["id"]
        if not isinstance(number, int):
            raise ProtocolError("call id is not a number")
        if header["t"] == "call":
            self._call(number, header, payload)
        elif call := self.calls.get(number):
            self._go_on(call, number, header, payload)

    def _greet(self, header: dict[str, Any]) -> None:
        theirs = bytes.fromhex(header["nonce"])
        token = self._server.token
        if header["t"] != "hello" or len(theirs) != protocol.NONCE_BYTES:
            raise ProtocolError("a hello was expected")
        self.for_doors = header.get("for") == "doors"
        role = "doors" if self.for_doors else "host"
        if not protocol.equals_secret(
            protocol.prove(token, role, self._nonce, theirs), header["proof"]
        ):
            raise ProtocolError("the token was not proved")
        self._deadline.cancel()
        proof = protocol.prove(token, "runner", theirs, self._nonce)
        about = {} if self.for_doors else self._server.describe()
        self.send({"t": "welcome", "proof": proof, **about})
        self.proved = True
        if not self.for_doors:
            self._decoder.seal = protocol.Seal(token, "to-runner", self._nonce + theirs)
            self._seal = protocol.Seal(token, "to-host", self._nonce + theirs)
        self._server.proved(self)

    def _call(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        if number in self.calls:
            raise ProtocolError("call id is in use")
        reply = Reply(self, number)
        if len(self.calls) >= protocol.MAX_CALLS:
            reply.fail("busy", f"{protocol.MAX_CALLS} calls are under way; wait for some to end")
            return
        try:
            self._owed[number] = len(payload)
            self._server.open_call(self, reply, header, payload)
        except OpError as exc:
            reply.fail(exc.code, exc.message)

    def _go_on(self, call: OpenCall, number: int, header: dict[str, Any], payload: bytes) -> None:
        if header["t"] == "data":
            self._owed[number] += len(payload)
            if self._owed[number] > protocol.WINDOW + protocol.MAX_PAYLOAD:
                raise ProtocolError("more data than credit was given for")
            call.feed(payload, more=bool(header.get("more")))
        elif header["t"] == "credit":
            call.credit(int(header["n"]))
        elif header["t"] == "cancel":
            call.cancel()
        elif header["t"] == "release":
            self._server.release(call)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if self._sock.fileno() < 0:
            return
        if header["t"] == "credit" and header["id"] in self._owed:
            self._owed[header["id"]] -= header["n"]
        parts = protocol.encode_parts(header, payload, self._seal)
        # What is sent at once is never buffered: most of the time would go into large buffers.
        sent = 0 if self._out else self._sent(parts)
        for part in parts:
            self._out += memoryview(part)[sent:]
            sent = max(0, sent - len(part))
        self._flush()

    def _sent(self, parts: Collection[bytes | bytearray | memoryview]) -> int:
        """Send without blocking; return how many bytes were taken."""
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:
            # Later: the caller is still using the call that closing would cancel.
            self._loop.call_later(0, self.close)
            return sum(map(len, parts))

    def _flush(self) -> None:
        if self._out:
            del self._out[: self._sent([self._out])]
        if bool(self._out) != self._blocked:
            self._blocked = not self._blocked
            self._watch(READ | WRITE if self._blocked else READ)

    def ended(self, number: int) -> None:
        if self.calls.pop(number, None) and not self.for_doors:
            self._server.used_at = time.monotonic()
        self._owed.pop(number, None)

    def close(self) -> None:
        """Close the socket and cancel its calls, whose results have no reader any more."""
        if self._sock.fileno() < 0:
            return
        self._deadline.cancel()
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        for call in list(self.calls.values()):
            call.cancel()
        self._server.closed(self)
