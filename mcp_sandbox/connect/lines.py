"""Lines of a byte stream, and what must be known of the message in each."""

import json
import re

LONGEST_READ_WHOLE = 64 << 10
_LONGEST_TEXT = 1024
# In text without escapes: a whole string, or a bracket.
_TOKEN = re.compile(rb'"[^"]*+"|[{}\[\]]')

Id = int | str


class TooLong(Exception):
    """A line passed the limit."""


class Lines:
    """Collects bytes until lines are whole."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are whole now, with their ends.

        Raises:
            TooLong: the last line, which has no end yet, is too long.
        """
        if self._dropping:
            _, end, data = data.partition(b"\n")
            self._dropping = not end
        whole, end, rest = data.rpartition(b"\n")
        if end:
            lines = b"".join((self._rest, whole, end))
            self._rest = bytearray(rest)
            return lines
        self._rest += rest
        if len(self._rest) > self._longest:
            raise TooLong
        return b""

    def cut_short(self) -> bytes:
        """Return the beginning of the last line as if it ended there; the rest is dropped."""
        beginning = b"".join((self._rest, b"\n"))
        self._rest.clear()
        self._dropping = True
        return beginning


class Message:
    """A line and what is known of it: its id, its method, and the request that it speaks of."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.id: Id | None = None
        self.method: str | None = None
        self.cancels: Id | None = None
        self.failed = False
        self.repeated = False
        self.is_answer = False
        fields = _top_level(line)
        if fields is not None:
            self._take(fields)

    @property
    def is_request(self) -> bool:
        return self.id is not None and self.method is not None

    @property
    def needs_server(self) -> bool:
        """Whether a server has something to say to it: a request, or what cannot be read."""
        return self.is_request or (self.method is None and not self.is_answer)

    def _take(self, fields: dict[str, object]) -> None:
        method, params = fields.get("method"), fields.get("params")
        self.is_answer = "method" not in fields and ("result" in fields or "error" in fields)
        self.id = _id(fields.get("id"))
        self.method = method if isinstance(method, str) else None
        self.failed = "error" in fields
        if method == "notifications/cancelled" and isinstance(params, dict):
            self.cancels = _id(params.get("requestId"))


def messages(lines: bytes) -> list[Message]:
    """The messages of whole lines; blank lines are none."""
    return [Message(line + b"\n") for line in lines.split(b"\n") if line.strip()]


def _id(value: object) -> Id | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _top_level(line: bytes) -> dict[str, object] | None:
    if len(line) > LONGEST_READ_WHOLE:
        line = outline(line)
        if len(line) > LONGEST_READ_WHOLE:
            return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def outline(line: bytes) -> bytes:
    """The JSON without what lies deeper than its parameters, and without long texts.

    A message of megabytes is known by this at the price of copying it.
    """
    plain = line.replace(rb"\\", b"..").replace(rb"\"", b"..")
    kept = list[bytes]()
    depth = start = 0
    for token in _TOKEN.finditer(plain):
        first, size = plain[token.start()], token.end() - token.start()
        if first in b"{[":
            depth += 1
            if depth == 3:
                kept.append(line[start : token.end()])
                start = len(line)
        elif first in b"}]":
            if depth == 3:
                start = token.start()
            depth -= 1
        elif depth < 3 and size > _LONGEST_TEXT:
            kept.append(line[start : token.start()] + b'""')
            start = token.end()
    kept.append(line[start:])
    return b"".join(kept)
