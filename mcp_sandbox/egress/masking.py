"""Blots out values in bytes that pass, each in the forms in which programs write it. Pure.

These are the value itself, JSON, percent-encoding and base64 (of either alphabet, wherever the
value begins in what was encoded). It is a net and no wall: other encodings pass.
"""

import json
import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

FILLER = b"*"

_Span = tuple[int, int]
_TO_URL = bytes.maketrans(b"+/", b"-_")
_ESCAPES = ("%{:02x}", "%{:02X}"), (r"\u{:04x}", r"\u{:04X}")
_ESCAPE_BEGUN = re.compile(rb"(?:%[2-7]?|\\(?:u(?:0(?:0[2-7]?)?)?)?)\Z")
_LONGEST_ESCAPE = 6
_HEAD = 8


class Mask:
    """Knows values, each of 12 bytes and more of printable ASCII, in all their forms."""

    def __init__(self, values: Iterable[bytes]) -> None:
        forms = {form for value in values for form in _forms(value)}
        # Those that begin escapes come last: what is left by reading them is not read again.
        marks = sorted({c for form in forms for c in form if not chr(c).isalnum()}, key=b"%\\".find)
        self._readings = [_Reading(how, marks) for how in _ESCAPES] if marks else []
        whole = {"".join(map(how.format, value)) for value in values for e in _ESCAPES for how in e}
        self._forms = sorted(forms | {form.encode() for form in whole})
        self._heads = {form[:length] for form in self._forms for length in range(1, _HEAD)}

    def text(self, data: bytes) -> bytes:
        """Return a whole text with filler for each value in it, of the same length."""
        return _filled(data, self.look(data, ended=True)[0])

    def stream(self) -> "Masking":
        """Return what does the same to bytes that come in pieces."""
        return Masking(self)

    def look(self, data: bytes, *, ended: bool) -> tuple[list[_Span], int]:
        """Return where values are, and where the first begins of which more may come."""
        cut = None if ended else _ESCAPE_BEGUN.search(data, max(0, len(data) - _LONGEST_ESCAPE))
        whole = data[: cut.start()] if cut else data
        spans, begun = self._found(data), min(self._begun(data), self._begun(whole))
        for reading in self._readings:
            if plain := reading.plain(whole):
                found, first = self._found(plain), self._begun(plain)
                if found or first < len(plain):
                    place = reading.places(whole)
                    spans += [(place(start), place(end)) for start, end in found]
                    begun = min(begun, place(first))
        return spans, len(data) if ended else begun

    def _found(self, data: bytes) -> list[_Span]:
        found = list[_Span]()
        for form in self._forms:
            at = data.find(form)
            while at >= 0:
                found.append((at, at + len(form)))
                at = data.find(form, at + 1)
        return found

    def _begun(self, data: bytes) -> int:
        ends = (data[-length:] for length in range(_HEAD - 1, 0, -1))
        first = len(data) - next((len(end) for end in ends if end in self._heads), 0)
        for form in self._forms:
            at = data.find(form[:_HEAD], max(0, len(data) - len(form) + 1), first + _HEAD)
            while at >= 0 and not form.startswith(data[at:]):
                at = data.find(form[:_HEAD], at + 1, first + _HEAD)
            first = min(first, at) if at >= 0 else first
        return first


class Masking:
    """One stream of bytes; what comes out is as long as what went in."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._kept = b""
        self._covered = 0  # So much of what is kept belongs to a value that began before it.

    def feed(self, data: bytes, *, ended: bool = False) -> bytes:
        """Take a piece, and return what can be told by now.

        At most the longest form of a value is kept back, and only where one may have begun.
        """
        data = self._kept + data
        spans, until = self._mask.look(data, ended=ended)
        if self._covered:
            spans.append((0, self._covered))
        self._kept = data[until:]
        self._covered = max(
            (end - until for start, end in spans if start <= until < end), default=0
        )
        return _filled(data, spans)[:until]

    def end(self) -> bytes:
        """Return the rest."""
        return self.feed(b"", ended=True)


class _Reading:
    """Reads the escapes of some characters, none of which begins within another."""

    def __init__(self, how: Iterable[str], marks: Iterable[int]) -> None:
        self._meant = {each.format(c).encode(): bytes((c,)) for c in marks for each in how}
        if rb"\u002f" in self._meant:
            self._meant = {rb"\/": b"/", **self._meant}
        self._any = re.compile(b"|".join(map(re.escape, self._meant)))

    def plain(self, data: bytes) -> bytes:
        """Return the data with its escapes read, empty if there are none."""
        if not self._any.search(data):
            return b""
        for escape, character in self._meant.items():
            data = data.replace(escape, character)
        return data

    def places(self, data: bytes) -> Callable[[int], int]:
        """Return what says where in the data is what is at a place of the plain data."""
        starts, shifts = [0], [0]
        for each in self._any.finditer(data):
            starts.append(each.start() - shifts[-1] + 1)
            shifts.append(shifts[-1] + len(each[0]) - 1)
        return lambda at: at + shifts[bisect_right(starts, at) - 1]


def _forms(value: bytes) -> Iterator[bytes]:
    yield value
    yield value.replace(b" ", b"+")
    yield json.dumps(value.decode("ascii"))[1:-1].encode()
    for before in range(3):
        # Of the digits only those that depend on nothing but the value.
        digits = b64encode(bytes(before) + value)
        inner = digits[-(-8 * before // 6) : 8 * (before + len(value)) // 6]
        yield inner
        yield inner.translate(_TO_URL)


def _filled(data: bytes, spans: list[_Span]) -> bytes:
    if not spans:
        return data
    filled = bytearray(data)
    for start, end in spans:
        filled[start:end] = FILLER * (end - start)
    return bytes(filled)
