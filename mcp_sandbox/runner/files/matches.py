"""What a search for lines is asked for and what it found: the same for both engines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from mcp_sandbox.runner.files.paths import TEMPORARY, relative, workspace
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TEXT = 500
MAX_BYTES = 8 * 1024 * 1024


class Query(NamedTuple):
    """Look for `pattern` below the directory `base`, or in its file `only`.

    `shown` is the path as the caller meant it; `glob` is normalized, or empty for all files.
    """

    pattern: str
    shown: str
    base: str
    only: str
    glob: str
    ignore_case: bool
    context: int
    limit: int

    def name(self, path: str) -> str:
        """How results name a path relative to `base`."""
        return relative(self.shown if self.only else f"{self.shown.rstrip('/')}/{path}")


def usable(pattern: str) -> str:
    """The pattern.

    Raises:
        OpError: it is empty, or spans lines.
    """
    if not pattern or "\n" in pattern or "\0" in pattern:
        raise OpError(
            "invalid", "the pattern is empty or holds a line break: patterns match within one line"
        )
    return pattern


def wanted(*, git: bool, skills: str) -> Callable[[str], bool]:
    """Whether a path is looked at: no unfinished files of ours, no `skills`, .git with `git`."""

    def is_wanted(path: str) -> bool:
        name = path.rpartition("/")[2]
        return (git or name != ".git") and not name.startswith(TEMPORARY) and path != skills

    return is_wanted


def shown_skills(base: str, glob: str) -> str:
    """Where the chat's skills are shown, relative to `base`; empty if they are to be searched.

    They are when the search begins among them, or its glob names them; and so is a folder of
    that name that the chat may change: then it is its own.
    """
    inside = f"{base.rstrip('/')}/"
    place = f"{workspace()}/.claude/skills"
    if not f"{workspace()}/".startswith(inside) or ".claude" in glob.lstrip("!").split("/"):
        return ""
    return "" if os.access(place, os.W_OK) else place[len(inside) :]


class Found:
    """Matching lines, with the lines around them, up to a limit of matches."""

    def __init__(self, limit: int, context: int) -> None:
        self.matches = 0
        self.files = 0
        self.truncated = False
        self._limit = limit
        self._context = context
        self._lines: list[str] = []
        self._size = 0
        self._kept = 0
        self._path = ""
        self._last_line = 0
        self._last_match = 0
        self._before_file = (0, 0, 0)

    def add(self, path: str, number: int, text: str, column: int) -> bool:
        """Take the next line, which matches from `column` on if not 0; False when that is all."""
        if (column and self.matches >= self._limit) or self._size > MAX_BYTES:
            self.truncated = True
            return False
        self._separate(path, number)
        self._append(path, number, text, column)
        if column:
            self.files += path != self._path or not self._last_match
            self.matches += 1
            self._last_match = number
        if column or (self._last_match and number <= self._last_match + self._context):
            self._kept = len(self._lines)
        self._path, self._last_line = path, number
        return True

    def _separate(self, path: str, number: int) -> None:
        if path != self._path:
            self._before_file = (len(self._lines), self.matches, self.files)
            self._last_match = 0
        elif number == self._last_line + 1:
            return
        if self._context and self._lines:
            self._lines.append("--")

    def _append(self, path: str, number: int, text: str, column: int) -> None:
        sign = ":" if column else "-"
        line = f"{path}{sign}{number}{sign}{_window(text.rstrip(chr(13)), column)}"
        self._lines.append(line)
        self._size += len(line)

    def drop(self, path: str) -> None:
        """Forget what was found in this file, the last one: it is binary after all."""
        if path == self._path:
            kept, self.matches, self.files = self._before_file
            del self._lines[kept:]
            self._kept = kept
            self._path = ""

    def body(self) -> bytes:
        """The lines as UTF-8, each with its newline; broken characters are replaced.

        A cut result ends with its last match's context.
        """
        lines = self._lines[: self._kept] if self.truncated else self._lines
        raw = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        return raw.decode("utf-8", "replace").encode()


def _window(text: str, column: int) -> str:
    if len(text) <= MAX_TEXT:
        return text
    start = max(0, min(column - MAX_TEXT // 2, len(text) - MAX_TEXT))
    at, before = f"[column {column}] " if column else "", "[...] " if start else ""
    after = " [...]" if start + MAX_TEXT < len(text) else ""
    return f"{at}{before}{text[start : start + MAX_TEXT]}{after}"
