"""A small epoll loop: file descriptors, timers and SIGCHLD. One thread, no coroutines.

Asyncio would cost every idle sandbox several MiB and every command a millisecond. This loop moves
the bytes between a connection and the pipes of a job, bounded by credit in both directions.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import time

from mcp_sandbox.runner.kernel.native import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
CHUNK = 256 * 1024
# After a command has ended, as much as may still lie in its pipes is read, and no more: a child
# left in the background may print for ever.
DRAIN = 4 * 1024 * 1024


class Timer:
    """A planned call; `cancel` makes it do nothing."""

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class DeferredAction:
    """An action that runs once however often it is planned before that."""

    def __init__(self, loop: Loop, delay_s: float, action: Callable[[], None]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._action = action
        self.planned = False

    def plan(self) -> None:
        if not self.planned:
            self.planned = True
            self._loop.call_later(self._delay_s, self._run)

    def _run(self) -> None:
        self.planned = False
        self._action()


class Loop:
    """Waits for events and calls the function that watches for each."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watchers: dict[int, Callable[[int], object]] = {}
        self._timers: list[Timer] = []
        self._compact_at = 256
        self._stopped = False
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_signal: dict[int, Callable[[], None]] = {}
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.watch(self._wake_read, READ, self._signals)

    def on_signal(self, number: int, action: Callable[[], None]) -> None:
        self._on_signal[number] = action
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)

    def _signals(self, _events: int) -> None:
        try:
            numbers = os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            if action := self._on_signal.get(number):
                action()

    def watch(self, fd: int, events: int, callback: Callable[[int], object]) -> None:
        """Call `callback(events)` whenever `fd` is ready; watching again changes the events."""
        if fd in self._watchers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watchers[fd] = callback

    def unwatch(self, fd: int) -> None:
        if self._watchers.pop(fd, None):
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        if len(self._timers) > self._compact_at:
            self._timers = [timer for timer in self._timers if timer.action]
            heapq.heapify(self._timers)
            self._compact_at = 2 * len(self._timers) + 256
        timer = Timer(time.monotonic() + delay_s, action)
        heapq.heappush(self._timers, timer)
        return timer

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            for fd, events in self._epoll.poll(self._timeout()):
                # An earlier callback of this round may have closed the descriptor.
                if callback := self._watchers.get(fd):
                    callback(events)
            now = time.monotonic()
            while self._timers and self._timers[0].when <= now:
                if action := heapq.heappop(self._timers).action:
                    action()

    def _timeout(self) -> float:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1.0
        return max(0.0, self._timers[0].when - time.monotonic())

    def close_in_child(self) -> None:
        """Detach from the parent's epoll after a fork, without changing what that watches."""
        signal.set_wakeup_fd(-1)
        self._epoll.close()


def widen_pipe(fd: int, size: int = 1024 * 1024) -> None:
    """Ask for a pipe of `size` bytes; the default is the most for an ordinary user."""
    try:
        fcntl.fcntl(fd, 1031, size)  # F_SETPIPE_SZ, named in Python only from 3.10 on
    except OSError:
        # The user's share of pipe memory is used up, or the kernel cannot: keep the default.
        return


class PipeReader:
    """Reads a pipe or terminal: `taken` gets what arrives, and b"" at the end."""

    def __init__(self, loop: Loop, fd: int, taken: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._taken = taken
        self.open = True
        self.resume()

    def resume(self) -> None:
        if self.open:
            self._loop.watch(self._fd, READ, self._read)

    def pause(self) -> None:
        if self.open:
            self._loop.unwatch(self._fd)

    def _read(self, _events: int = 0) -> int:
        """Read one piece; return its length, or -1 if there is none now."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return -1
        except OSError:
            data = b""  # EIO: no program has the terminal open any more.
        if not data:
            self.close()
        self._taken(data)
        return len(data)

    def drain(self, left: int) -> None:
        """Read what is there now, at most about `left` bytes."""
        while self.open and left > 0:
            size = self._read()
            if size < 0:
                return
            left -= size

    def discard(self) -> None:
        """Read on and drop the data, so that writers are neither blocked nor killed."""
        self._taken = lambda _data: None
        self.resume()

    def close(self) -> None:
        if self.open:
            self.open = False
            self._loop.unwatch(self._fd)
            os.close(self._fd)


class PipeWriter:
    """Writes a pipe: buffers what the reader has not taken, and gives credit for what it has.

    `end` follows the last byte: it tells the reader that the pipe was not closed by a crash.
    """

    def __init__(
        self, loop: Loop, fd: int, credit: Callable[[int], None], end: bytes = b""
    ) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._credit = credit
        self._end = end
        self.waiting = bytearray()
        self._last = False
        self._open = True

    def add(self, data: bytes, *, more: bool) -> None:
        self.waiting += data if more else data + self._end
        self._last = not more
        self._write()

    def _write(self, _events: int = 0) -> None:
        if not self._open:
            return
        try:
            size = os.write(self._fd, self.waiting) if self.waiting else 0
        except BlockingIOError:
            size = 0
        except OSError:
            self.close()
            return
        del self.waiting[:size]
        if size and not self._last:
            self._credit(size)
        if self.waiting:
            self._loop.watch(self._fd, WRITE, self._write)
        elif self._last:
            self.close()
        else:
            self._loop.unwatch(self._fd)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.unwatch(self._fd)
            os.close(self._fd)
