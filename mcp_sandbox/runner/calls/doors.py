"""Connections through the runner, both ways: to a port inside, and from a place inside.

A dial leads the host to a port of the sandbox's own loopback, never to any other address. A
door is a place inside where the host listens: each connection is a call to the host.

On a second connection a server calls `listen`, and then posts `door` again and again: a client
takes the door that was posted first, or waits in the kernel's queue. Several servers may share
one place; when the last of them leaves, the listener is closed, and clients are refused at
once.

That connection keeps no sandbox awake or alive, and its frames are not sealed: changing them
gains no more than every program inside may do: connect.
"""

from __future__ import annotations

import _socket
import errno
import os

from mcp_sandbox.runner.kernel.loop import READ, WRITE
from mcp_sandbox.runner.kernel.native import accept
from mcp_sandbox.runner.wire.protocol import CHUNK, MOST_PLACES, STREAM_WINDOW, OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.kernel.native import Socket
    from mcp_sandbox.runner.wire.connection import Reply


_LOOPBACK = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))
_TRY_AGAIN_S = 0.05
_KIND = _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
# Clients beyond the queue would not learn at once that the listener is gone.
_QUEUE = 1024
# How long a listener rests when no descriptor is left.
_DOORS_TRY_AGAIN_S = 0.1


class Traffic:
    """The bytes of a connection inside and of a call, both ways: each with its credit and end."""

    def __init__(self, loop: Loop, reply: Reply) -> None:
        self._loop = loop
        self._reply = reply
        self._sock: Socket | None = None
        self._waiting, self._more = bytearray(), True
        # Small: many connections at once may all be full because no client reads them.
        self._credit = STREAM_WINDOW
        # Which directions are open: from the socket, to the socket.
        self._reads = self._writes = True

    def begin(self, sock: Socket, *, only_look: bool = False) -> None:
        """Move the bytes of a connected socket; the call is done when both directions ended."""
        self._sock = sock
        self._reads = self._writes = not only_look
        self._move()

    def feed(self, data: bytes, *, more: bool) -> None:
        self._waiting += data if self._writes else b""
        self._more = more
        self._move()

    def credit(self, size: int) -> None:
        self._credit += size
        self._move()

    def close(self) -> None:
        if self._sock:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
        self._sock = None

    def _move(self, _events: int = 0) -> None:
        if self._sock and self._writes:
            self._write(self._sock)
        if self._sock and self._reads and self._credit > 0:
            self._read(self._sock)
        if not self._sock:
            return
        if not (self._reads or self._writes):
            self.close()
            self._reply.done({})
            return
        events = READ if self._reads and self._credit > 0 else 0
        events |= WRITE if self._waiting else 0
        if events:
            self._loop.watch(self._sock.fileno(), events, self._move)
        else:
            # With no event to watch, epoll would still report errors, again and again.
            self._loop.unwatch(self._sock.fileno())

    def _write(self, sock: Socket) -> None:
        try:
            size = sock.send(self._waiting) if self._waiting else 0
            del self._waiting[:size]
            if not (self._waiting or self._more):
                self._writes = False
                sock.shutdown(_socket.SHUT_WR)
            if size:
                self._reply.credit(size)
        except BlockingIOError:
            return
        except OSError:
            # What the peer sent before may still be read.
            self._writes, self._waiting = False, bytearray()

    def _read(self, sock: Socket) -> None:
        try:
            data = sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._credit -= len(data)
        self._reads = bool(data)
        self._reply.data("body" if data else "end", data or b"\0")


class Dial:
    """One connection to a port; with `look` it is closed as soon as it is made."""

    def __init__(self, loop: Loop, reply: Reply, args: dict[str, Any]) -> None:
        self._port, wait_s = int(args["port"]), float(args["wait_s"])
        if not 0 < self._port < 65536:
            raise OpError("invalid", "a port is a number from 1 to 65,535")
        self._loop = loop
        self._reply = reply
        self._look = bool(args["look"])
        self._tries = 0
        self._sock: Socket | None = None
        self._traffic = Traffic(loop, reply)
        self.feed, self.credit = self._traffic.feed, self._traffic.credit
        # Some kernels take a moment to refuse.
        self._limit = loop.call_later(max(wait_s, 2 * _TRY_AGAIN_S), self._give_up)

    def start(self, body: bytes, *, more: bool) -> None:
        self.feed(body, more=more)
        self._connect_to_next_address()

    def cancel(self) -> None:
        self._end("cancelled", "the connection was ended")

    def _connect_to_next_address(self) -> None:
        if self._limit.action is None:
            return
        family, address = _LOOPBACK[self._tries % 2]
        self._tries += 1
        try:
            self._sock = _socket.socket(family, _KIND)
            code = self._sock.connect_ex((address, self._port))
        except OSError:
            code = errno.EIO
        if self._sock and code in (0, errno.EINPROGRESS):
            self._loop.watch(self._sock.fileno(), WRITE, self._tried)
        else:
            self._try_again()

    def _try_again(self) -> None:
        self._drop()
        self._loop.call_later(0 if self._tries % 2 else _TRY_AGAIN_S, self._connect_to_next_address)

    def _tried(self, _events: int) -> None:
        assert self._sock
        try:
            # The kernel may have chosen that very port for this end: a socket connected to itself.
            is_made = self._sock.getsockname() != self._sock.getpeername()
        except OSError:
            is_made = False
        if is_made:
            self._limit.cancel()
            sock, self._sock = self._sock, None
            self._traffic.begin(sock, only_look=self._look)
        else:
            self._try_again()

    def _give_up(self) -> None:
        here = ", ".join(map(str, _listening())) or "none"
        what = f"nothing answers on port {self._port} of 127.0.0.1 or ::1 in this computer"
        self._end("not_found", f"{what}; ports that programs in it listen on: {here}")

    def _drop(self) -> None:
        if self._sock:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
        self._sock = None

    def _end(self, code: str, message: str) -> None:
        self._limit.cancel()
        self._drop()
        self._traffic.close()
        self._reply.fail(code, message)


def _listening() -> list[int]:
    """Return the first 20 ports that programs listen on; listeners come first in /proc/net/tcp."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", "rb") as table:
                rows = [row.split(None, 4) for row in table.read(CHUNK).splitlines()]
        except OSError:
            continue
        ports.update(int(row[1][-4:], 16) for row in rows if row[3:4] == [b"0A"])
    return sorted(ports)[:20]


class DoorListener:
    """A listener, the calls that keep it open, and the doors that are posted at it."""

    def __init__(self, loop: Loop, at: int | str, *, shared: bool) -> None:
        """Listen at port or path `at` (0: any free port); `shared` lets other servers join."""
        self.shared = shared
        self.listening: list[DoorCall] = []
        self.posted: list[DoorCall] = []
        self._loop = loop
        self._listener = _listener(at)
        self.at = at or int(self._listener.getsockname()[1])
        # After one such block was freed, glibc reuses smaller ones instead of mapping each anew.
        bytes(2 * CHUNK)

    def look(self) -> None:
        """Accept clients while a door is posted for them."""
        if self.posted and self.listening:
            self._loop.watch(self._listener.fileno(), READ, self._accept)
        else:
            self._loop.unwatch(self._listener.fileno())

    def _accept(self, _events: int) -> None:
        try:
            sock = accept(self._listener)
        except BlockingIOError:
            return
        except OSError:
            self._loop.unwatch(self._listener.fileno())
            self._loop.call_later(_DOORS_TRY_AGAIN_S, self.look)
            return
        sock.setblocking(False)
        if isinstance(self.at, int):
            sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        door = self.posted.pop(0)
        self.look()
        door.open(sock)

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        if isinstance(self.at, str):
            try:
                os.unlink(self.at)
            except OSError:
                return  # A program inside has removed it.


class DoorCall:
    """A call that keeps a place open, or one that waits for a client and carries its bytes."""

    def __init__(self, doors: DoorTable, place: DoorListener, reply: Reply) -> None:
        self._doors = doors
        self._place = place
        self._reply = reply
        self._traffic = Traffic(doors.loop, reply)
        self.feed, self.credit = self._traffic.feed, self._traffic.credit

    def open(self, sock: Socket) -> None:
        """Tell the host of the client before its first byte, which may never come."""
        self._reply.opened()
        self._traffic.begin(sock)

    def cancel(self) -> None:
        self._doors.leave(self._place, self)
        self._traffic.close()
        self._reply.fail("cancelled", "it was ended")


class DoorTable:
    """The places where the host listens."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._places: dict[int | str, DoorListener] = {}

    def open_call(self, reply: Reply, op: str, args: dict[str, Any]) -> DoorCall:
        if op not in ("listen", "door"):
            raise OpError("invalid", f"this connection is for doors: it takes no {op}")
        at = args["at"]
        if isinstance(at, str) and (at[:1] != "/" or "\0" in at):
            raise OpError("invalid", "a unix socket needs a path from the root")
        listens = op == "listen"
        place = self._place(at, bool(args["shared"])) if listens else self._places.get(at)
        if not place:
            raise OpError("not_found", f"nothing listens at {at}: call listen first")
        call = DoorCall(self, place, reply)
        (place.listening if listens else place.posted).append(call)
        place.look()
        if listens:
            port = place.at if isinstance(place.at, int) else 0
            # Leave most descriptors of this process to commands.
            reply.opened(os.sysconf("SC_OPEN_MAX") // 4, port)
        return call

    def _place(self, at: int | str, shared: bool) -> DoorListener:
        """Return the place, opened if it is new; OpError if it is taken or one too many."""
        place = self._places.get(at)
        if place and not (shared and place.shared):
            raise OpError("busy", f"a door is open at {at} already: choose another place")
        if not place and len(self._places) >= MOST_PLACES:
            raise OpError("busy", f"this sandbox has doors at {MOST_PLACES} places, the most")
        place = place or DoorListener(self.loop, at, shared=shared)
        self._places[place.at] = place
        return place

    def leave(self, place: DoorListener, call: DoorCall) -> None:
        for calls in (place.listening, place.posted):
            if call in calls:
                calls.remove(call)
        if place.listening:
            place.look()
        elif self._places.get(place.at) is place:
            del self._places[place.at]
            place.close()


def _listener(at: int | str) -> Socket:
    address: str | tuple[str, int] = ("127.0.0.1", at) if isinstance(at, int) else at
    family = _socket.AF_UNIX if address == at else _socket.AF_INET
    listener = _socket.socket(family, _KIND)
    try:
        # Connections of an earlier listener may still be ending there.
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_QUEUE)
    except (OSError, OverflowError) as exc:
        listener.close()
        raise OpError(
            "busy",
            f"no door can be opened at {address} in the sandbox ({exc}): "
            "a program inside may hold it; end that program, or reset the sandbox",
        ) from exc
    return listener
