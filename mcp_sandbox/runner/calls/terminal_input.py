"""The terminal of a command in pid 1: typing on it, and telling when its screen stops changing."""

from __future__ import annotations

import os
import re
import time

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.loop import PipeWriter
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire.protocol import COLUMNS, ROWS, OpError
from mcp_sandbox.runner.workers.programs import resize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_sandbox.runner.kernel.loop import Loop

_PLAIN = {"enter": "\r", "tab": "\t", "backspace": "\x7f", "space": " ", "escape": "\x1b"}
# In application mode, as full-screen programs expect; line editors accept these, too.
_LETTERS = zip(("up", "down", "right", "left", "end", "home", "f1", "f2", "f3", "f4"), "ABCDFHPQRS")
_NUMBERS = {"insert": 2, "delete": 3, "pageup": 5, "pagedown": 6}
_NUMBERS |= {f"f{n}": n + 10 + (n > 5) + (n > 10) for n in range(5, 13)}
KEYS = _PLAIN | {key: f"\x1bO{end}" for key, end in _LETTERS} | {"shifttab": "\x1b[Z"}
KEYS |= {key: f"\x1b[{number}~" for key, number in _NUMBERS.items()}
_SHORT = {"return": "enter", "esc": "escape", "del": "delete", "ins": "insert", "bs": "backspace"}
_SHORT |= {"pgup": "pageup", "pgdn": "pagedown", "pgdown": "pagedown", "backtab": "shifttab"}
_CONTROL = re.compile(r"<?(?:\^|c(?:on)?t(?:ro?)?l?[-+_ ]?|c-)([@-_a-z])>?", re.IGNORECASE)
_STILL_S, _MOST_S, _MOST_WAITING = 0.3, 5.0, 64 * 1024
_MODE = re.compile(rb"\x1b\[\?(1049|2004)([hl])")
# Movements up, down, and within a line, and erasures of more than its rest.
_DRAWS = re.compile(rb"\x1b(?:[78M]|\[(?:[0-9;]*[A-FHJLMPSTXdfr@]|\?(?:47|104[79])h))")


def find_key(name: str) -> bytes:
    """Return what a key sends, by any usual name of it; OpError if there is none."""
    if control := _CONTROL.fullmatch(name):
        return bytes([ord(control[1].upper()) & 31])
    word = re.sub(r"arrow|key|[-+_ <>]", "", name.lower())
    if (sent := KEYS.get(_SHORT.get(word, word))) is None:
        raise OpError("invalid", f"no key {name[:20]!r}: give one of {', '.join(KEYS)}, ctrl-a, …")
    return sent.encode()


class TerminalInput:
    """A new terminal; `theirs` are the program's descriptors for stdin, stdout and stderr."""

    def __init__(self, loop: Loop) -> None:
        try:
            self.master, slave = os.openpty()
        except OSError as exc:
            raise OpError("busy", f"this sandbox has no terminal left: {exc.strerror}") from exc
        resize(slave, ROWS, COLUMNS)
        self.theirs = [slave, os.dup(slave), os.dup(slave)]
        self.shown_at = 0.0
        # Whether its program has moved the cursor up or down, and modes that it has set.
        self.draws, self._modes = False, {b"1049": False, b"2004": False}
        self._loop = loop
        # A second descriptor: the loop watches the first for output.
        self._keys = PipeWriter(loop, os.dup(self.master), lambda _size: None)
        self.close = self._keys.close

    def type(self, text: bytes, key: str | None) -> bytes:
        """Type a text, then a key; return what that sends. OpError if the program does not read."""
        pressed = find_key(key) if key else b""
        if len(self._keys.waiting) > _MOST_WAITING:
            raise OpError("busy", "the program does not read what is typed")
        pasted = (text := text.replace(b"\r\n", b"\n")).rstrip(b"\n")
        # An editor of files would take its commands for text, too: it has a page of its own.
        if list(self._modes.values()) == [False, True] and (b"\n" in pasted or b"\t" in pasted):
            text = b"\x1b[200~%b\x1b[201~%b" % (pasted, text[len(pasted) :])
        self._keys.add(text.replace(b"\n", b"\r") + pressed, more=True)
        self.shown_at = time.monotonic()
        return pressed

    def note(self, data: bytes) -> None:
        """Note what the program sends."""
        self.shown_at = time.monotonic()
        self.draws = self.draws or bool(_DRAWS.search(data))
        self._modes |= {mode: state == b"h" for mode, state in _MODE.findall(data)}

    def when_still(self, still: Callable[[], object], until: float = 0.0) -> None:
        """Call `still` when the screen has not changed for 0.3 s, at the latest after 5 s."""
        now = time.monotonic()
        until = until or now + _MOST_S
        left = min(self.shown_at + _STILL_S, until) - now
        if left > 0:
            self._loop.call_later(left, lambda: self.when_still(still, until))
        else:
            still()

    def interrupt(self, main: int) -> None:
        """Interrupt as ctrl-c does, for gVisor, whose terminals know no foreground group."""
        try:
            os.tcgetpgrp(self.master)
        except OSError:
            import termios  # noqa: PLC0415 - under gVisor alone

            if termios.tcgetattr(self.master)[3] & termios.ISIG:
                for pid in (main, *processes.find_descendants([main], processes.map_parents())):
                    processes.send(pid, signal.SIGINT)
