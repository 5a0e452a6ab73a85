"""Shows known replacements as a unified diff, without comparing the rest of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_CONTEXT = 3
# Larger parts are shown as all old lines, then all new ones: comparing them would take seconds.
_COMPARABLE = 2000
_WINDOW = 256 * 1024


class Change(NamedTuple):
    """The bytes from `start` to `end` become `new`."""

    start: int
    end: int
    new: bytes


class _Window(NamedTuple):
    """Whole lines around neighbouring changes."""

    start: int
    end: int
    changes: list[Change]


def apply(content: bytes, changes: Iterable[Change], start: int, end: int) -> bytes:
    """The part of `content` from `start` to `end` with the changes, which are in order."""
    parts = []
    for change in changes:
        parts += [content[start : change.start], change.new]
        start = change.end
    return b"".join([*parts, content[start:end]])


def unified(content: bytes, changes: Sequence[Change], name: str, limit: int) -> bytes:
    """The diff as UTF-8. It is not carried on far once it is over `limit` bytes."""
    out = f"--- {name}\n+++ {name}\n".encode()
    line, where, shift = 1, 0, 0
    for window in _windows(content, changes):
        line += content.count(b"\n", where, window.start)
        where = window.start
        old = _lines(content[window.start : window.end])
        new = _lines(apply(content, window.changes, window.start, window.end))
        for hunk in _hunks(old, new, line, line + shift):
            out += hunk
            if len(out) > limit:
                return out
        shift += len(new) - len(old)
    return out


def _windows(content: bytes, changes: Sequence[Change]) -> Iterator[_Window]:
    """Changes with the lines around them; those whose lines meet share a window."""
    window = None
    for change in changes:
        start, end = _above(content, change.start), _below(content, change.end)
        if window and _joins(window, start, change):
            window.changes.append(change)
            window = _Window(window.start, end, window.changes)
            continue
        if window:
            yield window
            start = max(start, window.end)
        window = _Window(start, end, [change])
    if window:
        yield window


def _joins(window: _Window, start: int, change: Change) -> bool:
    small = window.end - window.start < _WINDOW
    return start <= window.end and (small or change.start < window.end)


def _above(content: bytes, start: int) -> int:
    """Where the context above the line of `start` begins."""
    start = content.rfind(b"\n", 0, start) + 1
    for _ in range(_CONTEXT):
        start = content.rfind(b"\n", 0, max(start - 1, 0)) + 1
    return start


def _below(content: bytes, end: int) -> int:
    """Where the context below the line of `end` ends."""
    for _ in range(_CONTEXT + 1):
        found = content.find(b"\n", end)
        if found < 0:
            return len(content)
        end = found + 1
    return end


def _lines(content: bytes) -> list[bytes]:
    """The lines with their newlines; a carriage return is no end of a line here."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _hunks(old: list[bytes], new: list[bytes], line: int, new_line: int) -> Iterator[bytes]:
    for group in _groups(old, new):
        first, last = group[0], group[-1]
        before = _range(line + first[1], last[2] - first[1])
        after = _range(new_line + first[3], last[4] - first[3])
        body = [_show(tag, old[a:b], new[c:d]) for tag, a, b, c, d in group]
        yield f"@@ -{before} +{after} @@\n".encode() + b"".join(body)


def _groups(old: list[bytes], new: list[bytes]) -> Iterable[list[tuple[str, int, int, int, int]]]:
    if len(old) > _COMPARABLE or len(new) > _COMPARABLE:
        return [[("replace", 0, len(old), 0, len(new))]]
    # Only edits need it, and it takes some milliseconds to import.
    from difflib import SequenceMatcher  # noqa: PLC0415

    return SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT)


def _range(line: int, count: int) -> str:
    """A range as diffs write it: without lines it names the line before."""
    if count == 1:
        return str(line)
    return f"{line - 1 if count == 0 else line},{count}"


def _show(tag: str, old: list[bytes], new: list[bytes]) -> bytes:
    if tag == "equal":
        return b"".join(_mark(b" ", line) for line in old)
    gone = b"".join(_mark(b"-", line) for line in old)
    return gone + b"".join(_mark(b"+", line) for line in new)


def _mark(sign: bytes, line: bytes) -> bytes:
    text = line.decode("utf-8", "replace")
    if text.endswith("\n"):
        return sign + text[:-1].removesuffix("\r").encode() + b"\n"
    return sign + text.encode() + b"\n\\ No newline at end of file\n"
