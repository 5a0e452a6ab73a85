"""Doors: the host listens at a place inside the sandbox; a connection there is a call to the host.

On a second connection a server calls `listen`, and then posts `door` again and again: a client
takes the door that was posted first, or waits in the kernel's queue. Several servers may share
one place; when the last of them leaves, the listener is closed, and clients are refused at
once.

That connection keeps no sandbox awake or alive, and its frames are not sealed: changing them
gains no more than every program inside may do: connect.
"""

from __future__ import annotations

import _socket
import os

from mcp_sandbox.runner.calls.dial import Traffic
from mcp_sandbox.runner.kernel.loop import READ
from mcp_sandbox.runner.kernel.native import accept
from mcp_sandbox.runner.wire.protocol import CHUNK, MOST_PLACES, OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Loop
    from mcp_sandbox.runner.kernel.native import Socket
    from mcp_sandbox.runner.wire.connection import Reply

# Clients beyond the queue would not learn at once that the listener is gone.
_QUEUE = 1024
_KIND = _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
# How long a listener rests when no descriptor is left.
_TRY_AGAIN_S = 0.1


class Place:
    """A listener, the calls that keep it open, and the doors that are posted at it."""

    def __init__(self, loop: Loop, at: int | str, *, shared: bool) -> None:
        """Listen at port or path `at` (0: any free port); `shared` lets other servers join."""
        self.shared = shared
        self.listening: list[Door] = []
        self.posted: list[Door] = []
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
            self._loop.later(_TRY_AGAIN_S, self.look)
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


class Door:
    """A call that keeps a place open, or one that waits for a client and carries its bytes."""

    def __init__(self, doors: Doors, place: Place, reply: Reply) -> None:
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


class Doors:
    """The places where the host listens."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._places: dict[int | str, Place] = {}

    def open_call(self, reply: Reply, op: str, args: dict[str, Any]) -> Door:
        if op not in ("listen", "door"):
            raise OpError("invalid", f"this connection is for doors: it takes no {op}")
        at = args["at"]
        if isinstance(at, str) and (at[:1] != "/" or "\0" in at):
            raise OpError("invalid", "a unix socket needs a path from the root")
        listens = op == "listen"
        place = self._place(at, bool(args["shared"])) if listens else self._places.get(at)
        if not place:
            raise OpError("not_found", f"nothing listens at {at}: call listen first")
        call = Door(self, place, reply)
        (place.listening if listens else place.posted).append(call)
        place.look()
        if listens:
            port = place.at if isinstance(place.at, int) else 0
            # Leave most descriptors of this process to commands.
            reply.opened(os.sysconf("SC_OPEN_MAX") // 4, port)
        return call

    def _place(self, at: int | str, shared: bool) -> Place:
        """Return the place, opened if it is new; OpError if it is taken or one too many."""
        place = self._places.get(at)
        if place and not (shared and place.shared):
            raise OpError("busy", f"a door is open at {at} already: choose another place")
        if not place and len(self._places) >= MOST_PLACES:
            raise OpError("busy", f"this sandbox has doors at {MOST_PLACES} places, the most")
        place = place or Place(self.loop, at, shared=shared)
        self._places[place.at] = place
        return place

    def leave(self, place: Place, call: Door) -> None:
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
