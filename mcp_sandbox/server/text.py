"""Text on its way to a model: control characters shown, length bounded. Pure functions."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from mcp_sandbox.runner.calls.plain import STEERING

T = TypeVar("T")

MAX_TEXT_BYTES = 30_000
"""What one result may hold; clients cut or hide more than about 40 kB."""

_KEPT = "\n\t"
# Right-to-left marks and overrides make text read differently from what it is.
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT},
    0x7F: "␡",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in [*_BIDI, 0x2028, 0x2029]},
    **{code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)},
}
_SHOWN_ON_ONE_LINE = {**_SHOWN, ord("\n"): "␊", ord("\t"): "␉"}
# What Node.js says of our variables is not shown either.
_TERMINAL = re.compile(
    STEERING + r"|\(node:\d{1,7}\) \[UNDICI-EHPA\].*\n(?:\(Use `node --trace-warnings.*\n)?"
)
# Back to a line's begin, and with what it held erased: a cancel character stands for that.
_RETURN = re.compile(r"\x1b\[1?G")
_ERASED = re.compile(r"\r(?:\x1b\[[0-9;]*m)*\x1b\[0?[JK]|\x1b\[2[JK]")
_NO_LETTERS = re.compile(r"[\W\d_]+")
# Of an error as Node.js shows it: its own line that threw it, what led there, its version.
_INTERNALS = re.compile(
    r"(?m)^node:\S+:\d+\n(?:.+\n){1,3}\n|^ +at\b.*(?:[ (]node:|/javascript\.cjs).*\n?"
    r"|^\nNode\.js v.*\n"
)


def show(text: str) -> str:
    """Make control characters, escape sequences and lone surrogates of a text visible."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def clean_output(text: str) -> str:
    """Return what a program printed, without colours, and of an overwritten line the last state."""
    return show("\n".join("\n".join(_overwrite(line)) for line in _split_rows(text)))


def count_overwritten(text: str) -> int:
    """Return how many rows of what a program printed later ones have overwritten."""
    if "\r" not in text and "\x1b" not in text:
        return 0
    lines = [rows for rows in _split_rows(text) if len(rows) > 1]
    seen = sum(bool(row.strip("\x18 ")) for rows in lines for row in rows)
    return seen - sum(bool(row.strip()) for rows in lines for row in _overwrite(rows))


def _split_rows(text: str) -> Iterable[list[str]]:
    text = _TERMINAL.sub("", _ERASED.sub("\r\x18", _RETURN.sub("\r", text)))
    text = re.sub(r"[^\r\n]+", lambda row: _go_back(row[0]) if "\b" in row[0] else row[0], text)
    return (line.rstrip("\r").split("\r") for line in text.split("\n"))


def _go_back(row: str) -> str:
    kept, at = list[str](), 0
    for char in row:
        if char == "\b":
            at = max(0, at - 1)
        else:
            kept[at : at + 1], at = char, at + 1
    return "".join(kept)


def _overwrite(rows: list[str]) -> list[str]:
    """Drop the rows that a later one covers, or goes on from with the same words, as progress."""
    kept, before = [""], ""
    for row in rows:
        words = _NO_LETTERS.sub("", row)
        covers = row[-1:] == " " and len(row) >= len(kept[-1].rstrip())
        alike = words == before or (words and before.startswith(words)) or not kept[-1].strip()
        if alike or covers or row[:1] == "\x18" or (before and words.startswith(before)):
            kept.pop()
        kept.append(row.lstrip("\x18"))
        before = words
    return [row for row in kept if row.strip()] or kept[-1:]


def without_internals(text: str) -> str:
    """Return what Node.js says of an error, without the frames of Node.js itself."""
    return _INTERNALS.sub(lambda found: "{\n" if found[0].endswith(" {\n") else "", text)


def show_name(name: str) -> str:
    """Return the same for a name or path: on one line whatever is in it."""
    return name.translate(_SHOWN_ON_ONE_LINE)


def count_bytes(text: str) -> int:
    """Return how long the text is on the wire."""
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Shortened:
    """Head and tail of a text; `left_out` bytes are missing between them (0: all is in head).

    `next_line` is the 1-based line in which the missing part begins.
    """

    head: str
    tail: str = ""
    left_out: int = 0
    next_line: int = 0


def shorten(text: str, max_bytes: int) -> Shortened:
    """Cut the middle out of a text that is longer than `max_bytes`, at line ends where possible."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= max_bytes:
        return Shortened(text)
    head, tail = data[: max_bytes // 2], data[len(data) - (max_bytes - max_bytes // 2) :]
    end, start = head.rfind(b"\n") + 1, tail.find(b"\n") + 1
    head = head[:end] if end > len(head) // 2 else head
    tail = tail[start:] if 0 < start <= len(tail) // 2 else tail
    return Shortened(
        head=head.decode("utf-8", "ignore"),
        tail=tail.decode("utf-8", "ignore"),
        left_out=len(data) - len(head) - len(tail),
        next_line=head.count(b"\n") + 1,
    )


def clip(text: str, max_chars: int) -> str:
    """Return the beginning of a text, with a sign where it was cut."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def take_fitting(items: Iterable[T], max_bytes: int, text: Callable[[T], str] = str) -> list[T]:
    """Return the first items whose lines of text fit together; one at least."""
    used, found = 0, list[T]()
    for item in items:
        used += count_bytes(text(item)) + 1
        if used > max_bytes and found:
            break
        found.append(item)
    return found
