"""Finds lines in files of any size and with lines of any length, in bounded memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 1024 * 1024
# How much of the rest is read only to tell how many lines there are.
_CHEAP = 32 * 1024 * 1024


class Cut(NamedTuple):
    """Which lines are wanted: `limit` from the 1-based `offset`.

    At most `max_bytes` in all (but always one line), `max_line` characters of each.
    """

    offset: int
    limit: int
    max_bytes: int
    max_line: int


class Part(NamedTuple):
    """Lines as UTF-8, each with its newline but for a last one that has none in the file."""

    data: bytes
    lines: int
    total: int | None
    more: bool
    long_lines_cut: int


class Line(NamedTuple):
    """The first bytes of a line, its whole length, and where the next one starts."""

    head: bytes
    length: int
    ended: bool
    next: int


def read_part(fd: int, cut: Cut) -> Part:
    """The wanted lines of a file."""
    start, before = _skip(fd, cut.offset - 1)
    if before < cut.offset - 1:
        return Part(b"", 0, before, more=False, long_lines_cut=0)
    shown: list[bytes] = []
    size = long_lines = 0
    for line in split(fd, start, cut.max_line * 4 + 2):
        text, was_cut = _tidy(line, cut.max_line, first=start == 0)
        if len(shown) >= cut.limit or (shown and size + len(text) > cut.max_bytes):
            break
        shown.append(text)
        size += len(text)
        long_lines += was_cut
        start = line.next
    more, rest = _rest(fd, start)
    total = None if rest is None else cut.offset - 1 + len(shown) + rest
    return Part(b"".join(shown), len(shown), total, more, long_lines)


def _tidy(line: Line, max_line: int, *, first: bool) -> tuple[bytes, bool]:
    """The line as valid UTF-8 without carriage return and byte order mark; whether it was cut."""
    text = line.head.decode("utf-8", "replace")
    if line.length == len(line.head):
        text = text.removesuffix("\r")
    if first:
        text = text.removeprefix("\ufeff")
    was_cut = len(text) > max_line
    return text[:max_line].encode() + (b"\n" if line.ended else b""), was_cut


def split(fd: int, start: int, keep: int) -> Iterator[Line]:
    """The lines from the byte `start` on, holding at most `keep` bytes of each."""
    head, length, where = b"", 0, start
    while chunk := os.pread(fd, _CHUNK, where):
        pos = 0
        while (end := chunk.find(b"\n", pos)) >= 0:
            head += chunk[pos : min(end, pos + keep - len(head))]
            yield Line(head, length + end - pos, True, where + end + 1)
            head, length, pos = b"", 0, end + 1
        head += chunk[pos : pos + keep - len(head)]
        length += len(chunk) - pos
        where += len(chunk)
    if length:
        yield Line(head, length, False, where)


def _skip(fd: int, count: int) -> tuple[int, int]:
    """Where the line after the first `count` lines starts; how many lines there were."""
    where = passed = 0
    last = b"\n"
    while passed < count and (chunk := os.pread(fd, _CHUNK, where)):
        here = chunk.count(b"\n")
        if passed + here >= count:
            return where + _after_newline(chunk, count - passed), count
        passed += here
        where += len(chunk)
        last = chunk[-1:]
    return where, passed + (last != b"\n")


def _after_newline(chunk: bytes, number: int) -> int:
    """The position after the given newline of the chunk, by halving."""
    low, high = 0, len(chunk)
    while high - low > 1:
        middle = (low + high) // 2
        here = chunk.count(b"\n", low, middle)
        if here >= number:
            high = middle
        else:
            number -= here
            low = middle
    return high


def _rest(fd: int, start: int) -> tuple[bool, int | None]:
    """Whether anything follows `start`; how many lines, None when that takes long to tell."""
    where, newlines = start, 0
    last = b"\n"
    while chunk := os.pread(fd, _CHUNK, where):
        newlines += chunk.count(b"\n")
        last = chunk[-1:]
        where += len(chunk)
        if where - start > _CHEAP:
            return True, None
    return where > start, newlines + (last != b"\n")
