"""A small epoll loop: file descriptors, timers and SIGCHLD. One thread, no coroutines.

asyncio would cost every idle sandbox several MiB and every command a millisecond.
"""

from __future__ import annotations

import heapq
import os
import select
import time

from mcp_sandbox.runner.native import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Timer:
    """A planned call; `cancel` makes it do nothing."""

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Soon:
    """An action that many may ask for, and that then happens once."""

    def __init__(self, loop: Loop, delay_s: float, action: Callable[[], None]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._action = action
        self._planned = False

    def plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.later(self._delay_s, self._run)

    def _run(self) -> None:
        self._planned = False
        self._action()


class Loop:
    """Waits for events and calls whoever watches for them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watchers: dict[int, Callable[[int], None]] = {}
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

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` whenever `fd` is ready; watching again changes the events."""
        if fd in self._watchers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watchers[fd] = callback

    def unwatch(self, fd: int) -> None:
        if self._watchers.pop(fd, None):
            self._epoll.unregister(fd)

    def later(self, delay_s: float, action: Callable[[], None]) -> Timer:
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
                # An earlier callback of this round may have closed it.
                if callback := self._watchers.get(fd):
                    callback(events)
            self._run_timers()

    def _timeout(self) -> float:
        while self._timers and self._timers[0].action is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1.0
        return max(0.0, self._timers[0].when - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            if action := heapq.heappop(self._timers).action:
                action()

    def close_in_child(self) -> None:
        """Forget everything after a fork, without touching what the parent watches."""
        signal.set_wakeup_fd(-1)
        self._epoll.close()
