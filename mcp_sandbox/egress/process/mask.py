"""Finds secret values in what comes back, in the forms in which programs write them.

The forms are the value itself, JSON, percent-encoding and base64 (of either alphabet, wherever the
value begins in what was encoded). This prevents accidents, not attacks: other encodings pass.
"""

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import unquote_to_bytes

FILLER = b"*"
Header = tuple[bytes, bytes]

_Span = tuple[int, int]
_TO_URL = bytes.maketrans(b"+/", b"-_")
# Escapes of printable ASCII, numeric or (in JSON) a backslash, also if cut off at the end.
_PERCENT = re.compile(rb"%(?:([2-7][\dA-Fa-f])|()[2-7]?\Z)")
_JSON = rb"\\(?:u00([2-7][\dA-Fa-f])|([%b])|(?:u(?:0(?:0[2-7]?)?)?)?\Z)"
_CUT_OFF = re.compile(rb"\\(?:u(?:0(?:0[2-7]?)?)?)?\Z")


class Mask:
    """Finds values, each of at least 12 bytes of printable ASCII, in all their forms."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._forms = sorted({form for value in values for form in _forms(value)})
        # JSON in JSON is full of escapes: only those that a value may need are decoded.
        marks = b"/" + bytes({*b'"\\'} & {*b"".join(self._forms)})
        self._hints = [rb"\u00", *(b"\\%c" % mark for mark in marks)]
        # A second pattern is for text after a backslash that belongs to no escape.
        kinds = {marks, marks.replace(b"\\", b"")}
        self._json = [re.compile(_JSON % re.escape(kind)) for kind in kinds]
        self._kept = b""
        self._covered = 0  # Kept bytes that belong to a value that began before them.

    def name(self, data: bytes) -> bytes:
        """Return a header's name, or filler if a value is in it, in whatever case of letters."""
        plain = unquote_to_bytes(data).lower()
        is_free = all(form.lower() not in plain for form in self._forms)
        return data if is_free else FILLER * len(data)

    def text(self, data: bytes, *, more: bool = False) -> bytes:
        """Return the bytes kept back and the data, each value replaced by filler of its length.

        If there is `more` to come, bytes that may begin a value are kept back: at most as many as
        the longest form has.
        """
        data = self._kept + data
        spans, begun = self._look(data)
        until = begun if more else len(data)
        spans.append((0, self._covered))
        self._kept = data[until:]
        self._covered = max(0, *(end - until for start, end in spans if start <= until))
        return _filled(data, spans)[:until]

    def _look(self, data: bytes) -> tuple[list[_Span], int]:
        """Return where values are, and where the first incomplete one begins."""
        spans, begun = self._search(data)
        hinted = any(hint in data for hint in self._hints)
        if not hinted and (cut := _CUT_OFF.search(data[-5:])):
            begun = min(begun, self._search(data[: -len(cut[0])])[1])
        for escapes in (_PERCENT, *(self._json if hinted else ())):
            if escapes.search(data):
                plain, place = escapes.sub(_meant, data), _places(escapes, data)
                found, first = self._search(plain)
                spans += [(place(start), place(end)) for start, end in found]
                begun = min(begun, place(first))
        return spans, begun

    def _search(self, data: bytes) -> tuple[list[_Span], int]:
        found, begun = list[_Span](), len(data)
        for form in self._forms:
            at = data.find(form)
            while at >= 0:
                found.append((at, at + len(form)))
                at = data.find(form, at + 1)
            at = data.find(form[:1], max(0, len(data) - len(form) + 1), begun)
            while at >= 0 and not form.startswith(data[at:]):
                at = data.find(form[:1], at + 1, begun)
            begun = at if at >= 0 else begun
        return found, begun


def _forms(value: bytes) -> Iterator[bytes]:
    yield value
    yield value.replace(b" ", b"+")
    for before in range(3):
        # Only the digits that depend on nothing but the value.
        digits = b64encode(bytes(before) + value)
        inner = digits[-(-8 * before // 6) : 8 * (before + len(value)) // 6]
        yield inner
        yield inner.translate(_TO_URL)


def _meant(escape: re.Match[bytes]) -> bytes:
    number, character = escape.groups(b"")
    return bytes.fromhex(number.decode("ascii")) or character


def _places(escapes: re.Pattern[bytes], data: bytes) -> Callable[[int], int]:
    """Return a function from positions in the decoded text to positions in the data."""
    starts, shifts = [0], [0]
    for each in escapes.finditer(data):
        starts.append(each.start() - shifts[-1] + 1)
        shifts.append(shifts[-1] + len(each[0]) - 1)
    return lambda at: at + shifts[bisect_right(starts, at) - 1]


def _filled(data: bytes, spans: list[_Span]) -> bytes:
    filled = bytearray(data)
    for start, end in spans:
        filled[start:end] = FILLER * (end - start)
    return bytes(filled)
