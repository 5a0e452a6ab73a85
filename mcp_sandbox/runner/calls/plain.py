"""Output without what steers a terminal, and the search for a text in it."""

from __future__ import annotations

import re

STEERING = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b\n]{0,4000}(?:\x07|\x1b\\)|[()][0-9AB]|[=>78c])"
)
"""Colours, movements, erasures, links, titles, sets of characters: none of it is shown."""
# By their last character, without which there is none: ends of lines, lines that an editor has
# broken, what is taken back.
_REPLACED = (
    (b"\x1b", re.compile(STEERING.encode()), b""),
    (b"\r", re.compile(rb"\r{1,9}\n"), b"\n"),
    (b"\r", re.compile(rb" \r(?!\n)"), b""),
    (b"\b", re.compile(rb"[^\n\x08\x80-\xbf][\x80-\xbf]*\x08"), b""),
)
# What the next bytes may complete.
_BEGUN = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]{0,4000}\x1b?|[()])?| ?\r{1,9}|)\Z")
_LONGEST = 4096


class TextSearch:
    """The search for a text in streams that come in pieces, behind the echo of what was typed."""

    def __init__(self, text: str, typed: str) -> None:
        self._text = _show(text.encode("utf-8", "replace")) or b"\x1b"
        self._echoes = typed.count(text)
        # Of each stream what the next piece may complete: a sequence as it came, a text as shown.
        self._rests: dict[str, tuple[bytes, bytes]] = {}

    def finds(self, name: str, data: bytes) -> bool:
        """Add a piece of a stream; return whether the text is there."""
        rest, seen = self._rests.get(name, (b"", b""))
        data = rest + data
        end = next(_BEGUN.finditer(data, max(0, len(data) - _LONGEST))).start()
        seen += _show(data[:end])
        while self._echoes and self._text in seen:
            seen, self._echoes = seen.partition(self._text)[2], self._echoes - 1
        self._rests[name] = data[end:], seen[max(0, len(seen) - len(self._text) + 1) :]
        return self._text in seen


def _show(data: bytes) -> bytes:
    for mark, pattern, by in _REPLACED:
        data = pattern.sub(by, data) if mark in data else data
    return data
