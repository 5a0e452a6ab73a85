"""Doors: the host listens at a place inside, and each connection there is a call to the host.

On a second connection a server calls `listen`, and then posts `door` again and again: a client
takes the door that was posted first, or waits in the kernel's queue. Several servers may listen at
one place; with the last of them the listener is gone, and clients are refused at once.

That connection counts for nothing: it keeps no sandbox awake or alive, and its frames are not
sealed, for who could change them gains what every program inside may do: connect.
"""

from __future__ import annotations

import _socket
import os

from mcp_sandbox.runner.dial import Traffic
from mcp_sandbox.runner.loop import READ
from mcp_sandbox.runner.native import accept
from mcp_sandbox.runner.protocol import CHUNK, MOST_DOORS, OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.connection import Reply
    from mcp_sandbox.runner.loop import Loop
    from mcp_sandbox.runner.native import Socket

# Clients beyond the queue would not be told at once that the listener is gone.
_QUEUE = 1024
_KIND = _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
# How long a listener rests when no descriptor is left.
_TRY_AGAIN_S = 0.1


class Place:
    """A listener, the calls that keep it open, and the doors that are posted at it."""

    def __init__(self, loop: Loop, at: int | str) -> None:
        self.at = at
        self.listening: list[Door] = []
        self.posted: list[Door] = []
        self._loop = loop
        self._listener = _listener(at)
        # Once such a block was freed, glibc keeps smaller ones; else each piece is mapped anew.
        bytes(2 * CHUNK)

    def look(self) -> None:
        """Take clients while there is a door for them."""
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
    """A call that keeps a place open, or one that waits for a client and then carries its bytes."""

    def __init__(self, doors: Doors, place: Place, reply: Reply) -> None:
        self._doors = doors
        self._place = place
        self._reply = reply
        self._traffic = Traffic(doors.loop, reply)
        self.feed, self.credit = self._traffic.feed, self._traffic.credit

    def open(self, sock: Socket) -> None:
        """Somebody has come: the host learns it before the first byte, which may never come."""
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
        if op == "door" and at not in self._places:
            raise OpError("not_found", f"nothing listens at {at}: call listen first")
        place = self._places[at] = self._places.get(at) or Place(self.loop, at)
        call = Door(self, place, reply)
        if op == "listen":
            place.listening.append(call)
            # Most descriptors of this process are left to commands.
            reply.opened(min(MOST_DOORS, os.sysconf("SC_OPEN_MAX") // 4))
        else:
            place.posted.append(call)
        place.look()
        return call

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
    """A listener on a port of 127.0.0.1, or at a path; OpError if there cannot be one."""
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
