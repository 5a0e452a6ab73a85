"""Tells which lines of a file are most similar to a text that is not in it."""

from __future__ import annotations

import re
import unicodedata
from difflib import SequenceMatcher
from heapq import nlargest
from itertools import takewhile
from os.path import commonprefix
from time import monotonic

MAX_CONTENT = 2 * 1024 * 1024
_SECONDS = 1.0
_SHOWN = 24
_WIDTH = 200
_ALIKE = 0.5
_CLOSE = 0.9
_COMPARED = 50


def describe_nearest(content: bytes, old: bytes, name: str) -> str:
    """Return the message for a text that was not found: the nearest lines and the differences."""
    given, text = (each.decode("utf-8", "backslashreplace") for each in (old, content))
    if slip := _slip(given, text):
        return f"old is in {name}, but without {slip}"
    wanted, lines = _lines(given), _lines(text[:MAX_CONTENT])
    out = []
    for start, begin in zip(_best(lines, wanted), ("The nearest are", "Almost as near are")):
        first, found = start + 1, lines[start : start + len(wanted)]
        differs = f"{_difference(wanted, found, first)} (- as given, + in the file)"
        out += [f"{begin} lines {first} to {start + len(found)}; {differs}:"]
        out += _compare(wanted, found, first)
    if not out:
        return (
            f"old is not in {name}, and nothing like it: read the file again and copy the text "
            "exactly, without line numbers"
        )
    last = "Copy the text exactly as it is in the file, then call again."
    return "\n".join([f"old is not in {name}. {out[0]}", *out[1:], last])


def _slip(given: str, text: str) -> str:
    """Return what was added to `given`, if the text holds it without that."""
    if given in text:
        return "the \\xNN that stand for bytes which are not UTF-8: give the text beside them alone"
    unescaped = given.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')
    if unescaped != given and unescaped in text:
        return 'a \\ before n, t or ": give the line ends, tabs and quotes themselves'
    unnumbered = re.sub(r"(?m)^ *\d+\t", "", given)
    if unnumbered != given and unnumbered.strip("\n") in text:
        return "the line numbers that read_file shows: leave them out"
    return ""


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _key(line: str) -> str:
    return " ".join(line[: 2 * _WIDTH].split())[:_WIDTH]


def _best(lines: list[str], wanted: list[str]) -> list[int]:
    end = monotonic() + _SECONDS
    keys = [_key(line) for line in wanted]
    starts = takewhile(lambda _: monotonic() < end, _candidates(lines, keys, end - _SECONDS / 2))
    places = [(_likeness(lines[at : at + len(keys)], keys), -at) for at in starts]
    best, at = max(places, default=(0.0, 0))
    apart = [place for place in places if abs(place[1] - at) >= len(keys)]
    second, other = max(apart, default=(0.0, 0))
    return [-at, *([-other] if second >= _CLOSE * best else [])] if best >= _ALIKE else []


def _candidates(lines: list[str], keys: list[str], end: float) -> list[int]:
    """Return where windows of lines share most triples of characters with the wanted ones."""
    grams = set().union(*map(_grams, keys[:_COMPARED]))
    known, totals = set(keys), [0]
    for index, line in enumerate(lines):
        if index % 64 == 0 and monotonic() > end:
            break
        own = _grams(key := _key(line))
        share = 3 * len(own & grams) - len(own)
        totals.append(totals[-1] + (2 * share if key in known else share))
    size, count = len(keys), len(totals) - 1
    windows = [(totals[min(at + size, count)] - totals[at], -at) for at in range(count)]
    peaks = nlargest(16, (max(windows[at : at + size]) for at in range(0, count, size)))
    return [max(shift - at, 0) for shift in (0, -1, 1) for _, at in peaks]


def _grams(key: str) -> set[str]:
    padded = f" {key} "
    return {padded[at : at + 3] for at in range(len(padded) - 2)}


def _likeness(there: list[str], keys: list[str]) -> float:
    """Return how much of the wanted text these lines hold, from 0 to 1."""
    score = 0.0
    for key, line in zip(keys[:_COMPARED], there):
        matcher = SequenceMatcher(None, _key(line), key, autojunk=False)
        runs = sum(size for _, _, size in matcher.get_matching_blocks() if size > 2)
        # A part of a long line has a low ratio, but is still found in it.
        score += max(matcher.ratio() * len(key), 0.8 * runs)
    return score / (sum(map(len, keys[:_COMPARED])) or 1)


def _difference(wanted: list[str], found: list[str], first: int) -> str:
    for number, (given, there) in enumerate(zip(wanted, found), first):
        at = len(commonprefix([given, there]))  # noqa: RUF071 - of texts, not paths
        parts = given[at : at + 2], there[at : at + 2]
        if any(parts) and (_key(given) == _key(there) or not "".join(parts).isascii()):
            return f"line {number} has {_point(there, at)} where old has {_point(given, at)}"
        if any(parts):
            break
    return "the text differs"


def describe_name(name: str, given: str) -> str:
    """Return a name, and which character it has that may only look like the given one's."""
    at = len(commonprefix([given, name]))  # noqa: RUF071 - of texts, not paths
    if (given[at : at + 2] + name[at : at + 2]).isascii():
        return name
    return f"{name} (with {_point(name, at)} instead of {_point(given, at)})"


def _point(line: str, at: int) -> str:
    """Return the names of a character and of the marks combined with it."""
    chars = line[at : at + 1] + "".join(takewhile(unicodedata.combining, line[at + 1 : at + 4]))
    names = " ".join(f"U+{ord(char):04X} {unicodedata.name(char, '')}" for char in chars)
    return names.strip() or "its end"


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
    """Return the line, shortened, with control characters visible."""
    cut = line[:_WIDTH] + ("..." if len(line) > _WIDTH else "")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
