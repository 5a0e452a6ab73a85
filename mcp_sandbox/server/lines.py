"""A byte stream cut into lines of bounded length."""

import json
import re
from dataclasses import dataclass
from itertools import islice

import anyio
from anyio.abc import ByteReceiveStream

MAX_LINE_BYTES = 32 << 20
"""Room for the largest content of write_file with every character escaped twice over."""
_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Overlong:
    """A line that was thrown away: its beginning and how long it was."""

    head: bytes
    size: int


class Lines:
    """The lines of a byte stream, one after the other."""

    def __init__(self, stream: ByteReceiveStream, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._dropped = 0
        self._head = b""

    async def next(self) -> bytes | Overlong | None:
        """The next line that is not blank, without its end; None when the stream has ended."""
        while True:
            line = self._cut()
            if line is None:
                try:
                    self._buffer += await self._stream.receive(_CHUNK_BYTES)
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return None
            elif isinstance(line, Overlong) or line.strip():
                return line

    def _cut(self) -> bytes | Overlong | None:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._drop_if_overlong()
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        if not self._dropped:
            return line
        overlong = Overlong(self._head, self._dropped + len(line))
        self._dropped = 0
        return overlong

    def _drop_if_overlong(self) -> None:
        if len(self._buffer) > self._max_bytes or self._dropped:
            if not self._dropped:
                self._head = bytes(self._buffer[:_HEAD_BYTES])
            self._dropped += len(self._buffer)
            self._buffer.clear()


# Whatever stands in a line is one of these, so that their number bounds the work. The closing quote
# is optional so that a string without end is taken whole, and only once.
_TOKEN = re.compile(rb'("(?:[^"\\]++|\\.)*+"?|[{}\[\]:,]|-?\d++)|[^"{}\[\]:,\d-]++|-', re.DOTALL)
# A list of numbers can have millions, and everybody else waits while they are looked at.
_MOST_TOKENS = 50_000


def find_request_id(line: bytes) -> str | int | None:
    """The id of a request that no parser takes, so that it can be refused by its id.

    Looks at the top level only and takes no notice of anything that is wrong elsewhere. Behind
    more than 50,000 tokens it is not found.
    """
    depth = 0
    recent: list[bytes] = []
    for match in islice(_TOKEN.finditer(line), _MOST_TOKENS):
        token = match[1]
        if token is None:
            continue
        if depth == 1 and recent[-2:] == [b'"id"', b":"]:
            return _id_value(token)
        depth += (token in b"{[") - (token in b"}]")
        recent = [*recent[-1:], token]
    return None


def _id_value(token: bytes) -> str | int | None:
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str | int) else None
