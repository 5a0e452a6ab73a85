"""Replaces text in files, byte by byte, so that line endings, marks and odd bytes stay."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.diff import Change, apply, unified
from mcp_sandbox.runner.files.paths import relative, resolve, show
from mcp_sandbox.runner.files.reading import open_regular
from mcp_sandbox.runner.files.writing import destination, replace
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Call

MAX_FILE = 32 * 1024 * 1024
MAX_BODY = 64 * 1024 * 1024
MAX_DIFF = 64 * 1024
MAX_CHANGES = 100_000
_SHOWN_LINES = 20


def edit(call: Call) -> dict[str, Any]:
    """Replace `old` by `new` (the two halves of the body) in a file; sends the diff."""
    path = resolve(call.text("path"))
    body = pipes.take(call.body(), MAX_BODY)
    old_bytes = call.number("old_bytes", 0, high=len(body))
    content, before = _load(path)
    old, new = _endings(content, body[:old_bytes], body[old_bytes:])
    _require_difference(old, new)
    starts = _find(content, old, path, replace_all=call.flag("replace_all"))
    changes = [Change(start, start + len(old), new) for start in starts]
    diff = _shorten(unified(content, changes, relative(path), MAX_DIFF))
    if not call.flag("dry_run"):
        _store(path, before, apply(content, changes, 0, len(content)))
    pipes.put(call.stdout, diff)
    return {"path": relative(path), "replacements": len(changes), "diff_bytes": len(diff)}


def _load(path: str) -> tuple[bytes, os.stat_result]:
    fd, found = open_regular(path)
    try:
        if found.st_size > MAX_FILE:
            raise OpError(
                "too_large",
                f"{show(path)} has {found.st_size} bytes, more than the {MAX_FILE} that can be "
                "edited so: change it with a program, such as sed through exec",
            )
        return pipes.take(pipes.chunks(fd), MAX_FILE), found
    finally:
        os.close(fd)


def _endings(content: bytes, old: bytes, new: bytes) -> tuple[bytes, bytes]:
    """`old` and `new` with the line endings that the file has throughout, if it does."""
    unix_old, unix_new = old.replace(b"\r\n", b"\n"), new.replace(b"\r\n", b"\n")
    newlines, pairs = content.count(b"\n"), content.count(b"\r\n")
    if pairs and pairs == newlines:
        return unix_old.replace(b"\n", b"\r\n"), unix_new.replace(b"\n", b"\r\n")
    if pairs and old not in content:
        # Both kinds of ending: what was given may be meant for a part with the other one.
        return unix_old.replace(b"\n", b"\r\n"), unix_new.replace(b"\n", b"\r\n")
    if newlines and not pairs and old not in content:
        return unix_old, unix_new
    return old, new


def _require_difference(old: bytes, new: bytes) -> None:
    if not old:
        raise OpError(
            "invalid", "old is empty: give the text to replace, or use write_file for a new file"
        )
    if old == new:
        raise OpError("invalid", "old and new are the same: there is nothing to change")


def _find(content: bytes, old: bytes, path: str, *, replace_all: bool) -> list[int]:
    """Where `old` is: once, or with `replace_all` everywhere without overlap.

    Raises:
        OpError: it is nowhere, or in several places.
    """
    first = content.find(old)
    if first < 0:
        # Only a failed edit needs difflib, and that takes some milliseconds to import.
        from mcp_sandbox.runner.files.nearest import describe_nearest  # noqa: PLC0415

        raise OpError("no_match", describe_nearest(content, old, show(path)))
    if replace_all:
        return _every(content, old, first)
    if content.find(old, first + 1) >= 0:
        raise OpError("ambiguous", _describe_places(content, old, path))
    return [first]


def _every(content: bytes, old: bytes, first: int) -> list[int]:
    starts = []
    while first >= 0:
        starts.append(first)
        if len(starts) > MAX_CHANGES:
            raise OpError(
                "too_large",
                f"old is there more than {MAX_CHANGES} times: change the file with a program, "
                "such as sed through exec",
            )
        first = content.find(old, first + len(old))
    return starts


def _describe_places(content: bytes, old: bytes, path: str) -> str:
    numbers: list[int] = []
    start, line, where = -1, 1, 0
    while len(numbers) < _SHOWN_LINES and (start := content.find(old, start + 1)) >= 0:
        line += content.count(b"\n", where, start)
        where = start
        numbers.append(line)
    more = content.find(old, start + 1) >= 0 if start >= 0 else False
    places = ", ".join(map(str, numbers)) + (" and further ones" if more else "")
    return (
        f"old is in {show(path)} more than once, beginning in lines {places}: give more of the "
        "text around the place you mean, or pass replace_all=true"
    )


def _store(path: str, before: os.stat_result, content: bytes) -> None:
    target, found = destination(path)

    def unchanged() -> None:
        now = os.stat(target)
        if _version(now) != _version(before):
            raise OpError(
                "no_match",
                f"{show(path)} was changed by something else meanwhile and was left so: read it "
                "again, then repeat the edit",
            )

    mode = (found or before).st_mode & 0o777
    replace(target, lambda fd: pipes.put(fd, content), mode, check=unchanged)


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _shorten(diff: bytes) -> bytes:
    if len(diff) <= MAX_DIFF:
        return diff
    note = b"... the rest of the diff is left out; the edit itself is whole\n"
    whole = diff[: MAX_DIFF - len(note)]
    return whole[: whole.rfind(b"\n") + 1] + note
