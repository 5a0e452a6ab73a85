"""Bytes between a connection and the pipes of a job, bounded by credit in both directions."""

from __future__ import annotations

import fcntl
import os

from mcp_sandbox.runner.loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.loop import Loop

CHUNK = 256 * 1024
# After a command has ended, as much as may still lie in its pipes is read, and no more: a child
# left in the background may print for ever.
_DRAIN = 4 * 1024 * 1024


def pipe() -> tuple[int, int]:
    """A pipe whose ends no child inherits, our end to be made non-blocking by its user."""
    return os.pipe2(os.O_CLOEXEC)


def widen(fd: int) -> None:
    """Ask for the largest pipe an ordinary user may have."""
    try:
        fcntl.fcntl(fd, 1031, 1024 * 1024)  # F_SETPIPE_SZ, named in Python only from 3.10 on
    except OSError:
        # The user's share of pipe pages is used up, or a kernel without it: the default will do.
        return


class Tap:
    """The reading end of a pipe: gives what arrives to `taken`, and tells the end by b""."""

    def __init__(self, loop: Loop, fd: int, taken: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._taken = taken
        self.open = True
        self.resume()

    def resume(self) -> None:
        if self.open:
            self._loop.watch(self._fd, READ, self._ready)

    def pause(self) -> None:
        if self.open:
            self._loop.unwatch(self._fd)

    def _ready(self, _events: int) -> None:
        self._read()

    def _read(self) -> int:
        """Take one piece; how long it was, -1 when there is none now."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return -1
        if not data:
            self.close()
        self._taken(data)
        return len(data)

    def drain(self) -> None:
        """Take what lies in the pipe."""
        left = _DRAIN
        while self.open and left > 0:
            size = self._read()
            if size < 0:
                return
            left -= size

    def discard(self) -> None:
        """From now on read for nobody, so that who still writes is neither blocked nor killed."""
        self._taken = _nothing

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.unwatch(self._fd)
            os.close(self._fd)


def _nothing(_data: bytes) -> None:
    return


class Inflow:
    """The writing end of a pipe: holds what is not taken yet, and gives credit for what is.

    `end` follows the last byte: who reads it knows that the pipe was not closed by our death.
    """

    def __init__(
        self, loop: Loop, fd: int, credit: Callable[[int], None], end: bytes = b""
    ) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._credit = credit
        self._end = end
        self._waiting = bytearray()
        self._last = False
        self._open = True

    def add(self, data: bytes, *, more: bool) -> None:
        self._waiting += data
        self._last = not more
        self._write()

    def _write(self, _events: int = 0) -> None:
        if not self._open:
            return
        try:
            size = os.write(self._fd, self._waiting) if self._waiting else 0
        except BlockingIOError:
            size = 0
        except BrokenPipeError:
            self.close()
            return
        del self._waiting[:size]
        if size:
            self._credit(size)
        if self._waiting or (self._last and not self._ended()):
            self._loop.watch(self._fd, WRITE, self._write)
        elif self._last:
            self.close()
        else:
            self._loop.unwatch(self._fd)

    def _ended(self) -> bool:
        """Write the end; False while the pipe is full. So few bytes go whole or not at all."""
        try:
            os.write(self._fd, self._end)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        return True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.unwatch(self._fd)
            os.close(self._fd)
