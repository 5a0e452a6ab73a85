"""Replaces text in files, byte by byte, so that line endings, marks and odd bytes stay."""

from __future__ import annotations

import os
import os.path
import re
from bisect import bisect
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.diff import Change, apply, unified
from mcp_sandbox.runner.files.paths import relative, resolve, show
from mcp_sandbox.runner.files.reading import open_regular
from mcp_sandbox.runner.files.writing import destination, replace
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    old, new = body[:old_bytes], body[old_bytes:]
    _require_difference(old, new)
    changes = _changes(content, old, new, path, every=call.flag("replace_all"))
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


def _changes(content: bytes, old: bytes, new: bytes, path: str, *, every: bool) -> list[Change]:
    """What becomes of each place; line ends stay as the file has them."""
    pairs = content.count(b"\r\n")
    throughout = 0 < pairs == content.count(b"\n")
    given = old + (new.replace(b"\r\n", b"") if throughout else new)
    if old not in content or (pairs and b"\n" in old and b"\r" not in given):
        return _bridged(content, old, new, path, every=every)
    if throughout:
        new = new.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        _require_difference(old, new)
    return [Change(at, at + len(old), new) for at in _find(content, old, path, every=every)]


def _bridged(content: bytes, old: bytes, new: bytes, path: str, *, every: bool) -> list[Change]:
    """The same where line ends differ, or where the last line lacks the newline that `old` has."""
    plain, old, new = (each.replace(b"\r\n", b"\n") for each in (content, old, new))
    if len(old) > 1 and plain[-1:] != b"\n" and old not in plain and (plain + b"\n").endswith(old):
        old, new = old[:-1], new.removesuffix(b"\n")
        starts = [len(plain) - len(old)]
    else:
        starts = _find(plain, old, path, every=every)
    _require_difference(old, new)
    # Where in the plain text each CR LF ends: from there on the content is one more byte ahead.
    pairs = list(accumulate(len(part) + 1 for part in content.split(b"\r\n")[:-1]))
    spans = [(at + bisect(pairs, at), at + len(old)) for at in starts]
    spans = [(start, end + bisect(pairs, end)) for start, end in spans]
    usual = b"\r\n" if pairs else b"\n"
    return [Change(a, b, _fitted(content[a:b], old, new, usual)) for a, b in spans]


def _fitted(found: bytes, old: bytes, new: bytes, usual: bytes) -> bytes:
    """`new` with the line ends of what was found for `old`; lines that stay keep theirs."""
    ends = re.findall(rb"\r?\n", found) or [usual]
    first, *lines = new.split(b"\n")
    both = [each.split(b"\n")[::-1] for each in (old, new)]
    same = len(os.path.commonprefix(both))  # noqa: RUF071 - of lines, not paths
    parts = [first]
    for index, line in enumerate(lines):
        below = index - len(lines)
        parts += [ends[below if -below < same else min(index, len(ends) - 1)], line]
    return b"".join(parts)


def _require_difference(old: bytes, new: bytes) -> None:
    if not old:
        raise OpError(
            "invalid", "old is empty: give the text to replace, or use write_file for a new file"
        )
    if old == new:
        raise OpError("invalid", "old and new are the same: there is nothing to change")


def _find(content: bytes, old: bytes, path: str, *, every: bool) -> list[int]:
    """Where `old` is: once, or with `every` everywhere without overlap.

    Raises:
        OpError: it is nowhere, or in several places, or in too many.
    """
    most = MAX_CHANGES if every else _SHOWN_LINES
    starts = list(islice(_starts(content, old, len(old) if every else 1), most + 1))
    if not starts:
        # Only a failed edit needs difflib, and that takes some milliseconds to import.
        from mcp_sandbox.runner.files.nearest import describe_nearest  # noqa: PLC0415

        raise OpError("no_match", describe_nearest(content, old, show(path)))
    if every and len(starts) > most:
        raise OpError(
            "too_large",
            f"old is there more than {MAX_CHANGES} times: change the file with a program, "
            "such as sed through exec",
        )
    if not every and len(starts) > 1:
        lines = ", ".join(str(content.count(b"\n", 0, at) + 1) for at in starts[:most])
        raise OpError(
            "ambiguous",
            f"old is in {show(path)} more than once, beginning in lines {lines}"
            f"{' and further ones' if len(starts) > most else ''}: give more of the text around "
            "the place you mean, or pass replace_all=true",
        )
    return starts


def _starts(content: bytes, old: bytes, step: int) -> Iterator[int]:
    at = content.find(old)
    while at >= 0:
        yield at
        at = content.find(old, at + step)


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
