"""What is typed on the terminal of a command, and when its screen has come to rest after it."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.loop import Inflow
from mcp_sandbox.runner.protocol import COLUMNS, ROWS, OpError
from mcp_sandbox.runner.worker import resize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.loop import Loop

_ARROWS = {"up": b"\x1b[A", "down": b"\x1b[B", "right": b"\x1b[C", "left": b"\x1b[D"}
_CONTROLS = {"ctrl-c": b"\x03", "ctrl-d": b"\x04", "ctrl-z": b"\x1a", "escape": b"\x1b"}
_PLAIN = {"enter": b"\r", "tab": b"\t", "backspace": b"\x7f", "space": b" "}
_PAGES = {"page-up": b"\x1b[5~", "page-down": b"\x1b[6~"}
KEYS = {**_PLAIN, **_ARROWS, **_PAGES, **_CONTROLS}
# Programs that draw switch the arrows to other sequences and back.
_ON, _OFF = b"\x1b[?1h", b"\x1b[?1l"
_STILL_S, _MOST_S = 0.3, 5.0
_MOST_WAITING = 64 * 1024


def open_terminal() -> tuple[int, list[int]]:
    """Our end of a new terminal, and the program's as its stdin, stdout and stderr."""
    try:
        master, slave = os.openpty()
    except OSError as exc:
        raise OpError("busy", f"no terminal is left in this sandbox: {exc.strerror}") from exc
    resize(master, ROWS, COLUMNS)
    return master, [slave, os.dup(slave), os.dup(slave)]


class Keyboard:
    """The keyboard of one terminal, whose `master` end pid 1 reads elsewhere."""

    def __init__(self, loop: Loop, master: int) -> None:
        self._loop = loop
        # The loop watches a descriptor for one thing only.
        self._keys = Inflow(loop, os.dup(master), self._took)
        self._waiting = 0
        self._shown_at = 0.0
        self._end = b""
        self._application = False

    def showed(self, data: bytes) -> None:
        """Take note of what the program has written."""
        self._shown_at = time.monotonic()
        seen = self._end + data
        on, off = seen.rfind(_ON), seen.rfind(_OFF)
        if on != off:
            self._application = on > off
        self._end = seen[1 - len(_ON) :]

    def type(self, text: bytes, key: str | None, still: Callable[[], None]) -> None:
        """Type a text, then a key; `still` is called when what they change on the screen is there.

        That is after 0.3 s without output, and at the latest after 5 s. May raise OpError.
        """
        data = text.replace(b"\r\n", b"\r").replace(b"\n", b"\r") + self._sent_by(key)
        if self._waiting + len(data) > _MOST_WAITING:
            raise OpError("busy", "the program does not read what is typed")
        self._waiting += len(data)
        self._shown_at = time.monotonic()
        self._keys.add(data, more=True)
        self._look(still, self._shown_at + _MOST_S)

    def _sent_by(self, key: str | None) -> bytes:
        sent = KEYS[key] if key else b""
        return sent.replace(b"[", b"O") if self._application and key in _ARROWS else sent

    def _took(self, size: int) -> None:
        self._waiting -= size

    def _look(self, still: Callable[[], None], until: float) -> None:
        left = min(self._shown_at + _STILL_S, until) - time.monotonic()
        if left > 0:
            self._loop.later(left, lambda: self._look(still, until))
        else:
            still()

    def close(self) -> None:
        self._keys.close()
