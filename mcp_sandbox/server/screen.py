"""What a terminal shows, as text, by pyte. It takes tens of milliseconds: call it in a thread."""

import re
import time
import unicodedata
from contextlib import suppress
from itertools import groupby

import pyte
from pyte.screens import Char, StaticDefaultDict, wcwidth

from mcp_sandbox.runner.protocol import COLUMNS, ROWS

_MOST_BYTES = 32 * 1024
_MOST_S = 0.5
_LONGEST_CELL = 8
_ALTERNATE = 1049
# Control strings and C1 controls; control sequences; other escape sequences; short pieces of text.
_PIECE = re.compile(
    r"(?P<ignored>\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x80-\x9f]+)"
    r"|\x1b\[(?P<values>[0-?]*)(?P<more>[ -/]*)[@-~]|\x1b[ -/]*[0-~]|\x1b|[^\x1b\x80-\x9f]{1,64}"
)
# In the values of a sequence that pyte would take for another one.
_FOREIGN = re.compile("[:<=>]")
# What pyte raises on values that it does not expect; it goes on after the sequence.
_RAISED = (TypeError, ValueError, LookupError, NameError, AttributeError, AssertionError)


def screen(data: bytes, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """What a screen shows after the end of `data`, without the empty lines at its bottom.

    Of what takes too long to draw, the text without escape sequences.
    """
    pieces = list(_PIECE.finditer(data[-_MOST_BYTES:].decode("utf-8", "replace")))
    drawn = _Screen(columns, rows)
    stream = pyte.Stream(drawn)
    stream.use_utf8 = False  # With it pyte ignores the choice of line-drawing characters.
    until = time.monotonic() + _MOST_S
    for piece in pieces:
        if piece["ignored"] or piece["more"] or _FOREIGN.search(piece["values"] or ""):
            continue
        with suppress(*_RAISED):
            stream.feed(piece[0])
        if time.monotonic() > until:
            return "".join(
                each[0] for each in pieces if each[0][0] != "\x1b" and not each["ignored"]
            )
    return drawn.text()


class _Screen(pyte.Screen):
    """Adds what pyte lacks: the second page of programs that draw, and marks without width."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        # What the second page hides; None when that is not shown.
        self._first: dict[int, StaticDefaultDict[int, Char]] | None = {}

    def set_mode(self, *modes: int, **kwargs: bool) -> None:
        super().set_mode(*modes, **kwargs)
        if _ALTERNATE in modes:
            self.save_cursor()
            self._first = self.buffer.copy()
            self.buffer.clear()

    def reset_mode(self, *modes: int, **kwargs: bool) -> None:
        super().reset_mode(*modes, **kwargs)
        if _ALTERNATE in modes and self._first is not None:
            self.restore_cursor()
            self.buffer.clear()
            self.buffer.update(self._first)
            self._first = None

    def draw(self, data: str) -> None:
        for wide, run in groupby(data, lambda char: wcwidth(char) > 0):
            if wide:
                super().draw("".join(run))
            elif self.cursor.x:
                line, at = self.buffer[self.cursor.y], self.cursor.x - 1
                joined = line[at].data + "".join(char for char in run if wcwidth(char) == 0)
                line[at] = line[at]._replace(data=joined[:_LONGEST_CELL])

    def text(self) -> str:
        cells = ((self.buffer[y][x].data for x in range(self.columns)) for y in range(self.lines))
        text = "\n".join("".join(line).rstrip() for line in cells).rstrip("\n")
        return unicodedata.normalize("NFC", text)
