"""Tells which lines of a file come nearest to a text that is not in it."""

from __future__ import annotations

from difflib import SequenceMatcher
from time import monotonic
from typing import NamedTuple

MAX_CONTENT = 2 * 1024 * 1024
_SECONDS = 1.0
_SHOWN = 24
_WIDTH = 200
_ALIKE = 0.5


class _Place(NamedTuple):
    """How well the text fits from this line on, counted from 0."""

    score: float
    start: int


def describe_nearest(content: bytes, old: bytes, name: str) -> str:
    """The message for a text that was not found: the nearest lines, and what differs."""
    wanted = _lines(old)
    lines = _lines(content[:MAX_CONTENT])
    place = _best(lines, wanted)
    if place is None:
        return (
            f"old is not in {name}, and nothing like it: read the file again and copy the text "
            "exactly, without line numbers"
        )
    found = lines[place.start : place.start + len(wanted)]
    last = place.start + len(found)
    return "\n".join(
        [
            f"old is not in {name}. The nearest are lines {place.start + 1} to {last}; "
            f"{_difference(wanted, found)} (- as given, + in the file):",
            *_compare(wanted, found, place.start + 1),
            "Copy the text exactly as it is in the file, then call again.",
        ]
    )


def _lines(data: bytes) -> list[str]:
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n")


def _best(lines: list[str], wanted: list[str]) -> _Place | None:
    """The place that fits best among those looked at in the time there is."""
    keys = [_key(line) for line in wanted]
    anchor = max(range(len(keys)), key=lambda i: len(keys[i]))
    if not keys[anchor]:
        return None
    exact = [_Place(0, i - anchor) for i, line in enumerate(lines) if _key(line) == keys[anchor]]
    places = exact[:200] or _alike(lines, keys[anchor], anchor)
    scored = [
        _Place(_fit(lines, keys, place.start) + place.score, max(place.start, 0))
        for place in places
    ]
    return max(scored, key=lambda place: (place.score, -place.start), default=None)


def _key(line: str) -> str:
    return " ".join(line.split())


def _alike(lines: list[str], key: str, anchor: int) -> list[_Place]:
    """Places whose line is most like the longest one that is wanted."""
    end = monotonic() + _SECONDS
    matcher = SequenceMatcher(None, "", key[:_WIDTH], autojunk=False)
    best: list[_Place] = []
    bar = _ALIKE
    for index, line in enumerate(lines):
        if index % 64 == 0 and monotonic() > end:
            break
        matcher.set_seq1(_key(line[: 2 * _WIDTH])[:_WIDTH])
        if matcher.real_quick_ratio() <= bar or matcher.quick_ratio() <= bar:
            continue
        ratio = matcher.ratio()
        if ratio > bar:
            bar = ratio
            best.append(_Place(ratio, index - anchor))
    return best[-5:]


def _fit(lines: list[str], keys: list[str], index: int) -> int:
    """How many lines are the same there but for white space."""
    start = max(index, 0)
    there = lines[start : start + len(keys)]
    return sum(1 for line, key in zip(there, keys[start - index :]) if _key(line) == key)


def _difference(wanted: list[str], found: list[str]) -> str:
    if [_key(line) for line in wanted] != [_key(line) for line in found]:
        return "the text differs"
    if [line.expandtabs(4) for line in wanted] == [line.expandtabs(4) for line in found]:
        return "tabs and spaces differ"
    return "only white space differs"


def _compare(wanted: list[str], found: list[str], first: int) -> list[str]:
    out = []
    matcher = SequenceMatcher(None, wanted[:200], found[:200], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            out += [f"- {'':>6}  {_shown(line)}" for line in wanted[a:b]]
        sign = " " if tag == "equal" else "+"
        out += [f"{sign} {first + c + i:>6}  {_shown(line)}" for i, line in enumerate(found[c:d])]
    rest = [f"... {len(out) - _SHOWN} more"] if len(out) > _SHOWN else []
    return out[:_SHOWN] + rest


def _shown(line: str) -> str:
    """The line, cut, with tabs and other control characters visible."""
    cut = line[:_WIDTH] + ("..." if len(line) > _WIDTH else "")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
