"""What a terminal shows, as text, by pyte. It takes tens of milliseconds: call it in a thread."""

import re
import time
import unicodedata
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import pyte
from pyte.screens import wcwidth

from mcp_sandbox.models import ExecResult
from mcp_sandbox.runner.wire.protocol import COLUMNS, ROWS
from mcp_sandbox.server.text import count_bytes

_MOST_BYTES = 32 * 1024
_MOST_S = 0.5
# Programs that draw on a page of their own leave it so; what it hid is not known any more.
_LEFT, _CLEARED = "\x1b[?1049l", "\x1b[H\x1b[2J"
# What pyte would draw or take for something else: control strings, sequences, C1 controls.
_IGNORED = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b\[[0-9;?]*(?:[:<=>][0-?]*[ -/]*|[ -/]+)[@-~]|[\x80-\x9f]"
)
_PIECE = re.compile(r"\x1b\[[0-?]*[@-~]|\x1b[ -/]*[0-~]|\x1b|[^\x1b]{1,64}")
# What pyte raises on values that it does not expect; it goes on after the sequence.
_RAISED = (TypeError, ValueError, LookupError, NameError, AttributeError, AssertionError)


def screen(data: bytes, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """Return the screen after `data`; if that takes too long, the text without escape sequences."""
    text = data[-_MOST_BYTES:].decode("utf-8", "replace")
    pieces = _PIECE.findall(_IGNORED.sub("", text).replace(_LEFT, _CLEARED))
    drawn = _Screen(columns, rows)
    stream = pyte.Stream(drawn)
    stream.use_utf8 = False  # With it pyte ignores the choice of line-drawing characters.
    until = time.monotonic() + _MOST_S
    for piece in pieces:
        with suppress(*_RAISED):
            stream.feed(piece)
        if time.monotonic() > until:
            return "".join(each for each in pieces if each[0] != "\x1b")
    lines = ("".join(drawn.buffer[y][x].data for x in range(columns)) for y in range(rows))
    return unicodedata.normalize("NFC", "\n".join(map(str.rstrip, lines)).rstrip("\n"))


def on_screen(result: ExecResult) -> ExecResult:
    """Return a result that has what its terminal shows instead of what was sent there."""
    text = screen(result.stdout.encode())
    return replace(result, stdout=text, stdout_bytes=count_bytes(text))


class _Screen(pyte.Screen):
    def draw(self, data: str) -> None:
        """Draw; what has no width, where pyte would stop, joins the character before it."""
        for wide, run in groupby(data, lambda char: wcwidth(char) > 0):
            if wide:
                super().draw("".join(run))
            elif self.cursor.x:
                line, at = self.buffer[self.cursor.y], self.cursor.x - 1
                marks = "".join(char for char in run if wcwidth(char) == 0)
                line[at] = line[at]._replace(data=line[at].data + marks)
