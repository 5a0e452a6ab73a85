"""Reads files of any size: as bytes, or as numbered lines of any length, in bounded memory."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from mcp_sandbox.runner.files.call import BIGGEST, closing_fd, put, send
from mcp_sandbox.runner.files.paths import relativize, resolve, show
from mcp_sandbox.runner.files.walk import kind_of
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mcp_sandbox.runner.files.call import OperationCall

MAX_IMAGE = 3_500_000
MAX_SIZELESS = 16 * 1024 * 1024
FIRST_BYTES = 256
_HEAD = 8192
_MAX_LINE = 2000  # Characters of a line that are shown.
_CHUNK = 1024 * 1024
# How much of the rest is read only to count its lines.
_CHEAP = 32 * 1024 * 1024
# PDF and UTF-16 can look like text.
_NO_TEXT = (b"%PDF-", b"\xff\xfe", b"\xfe\xff")
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Line(NamedTuple):
    """The first bytes of a line, its whole length, and where the next one starts."""

    head: bytes
    length: int
    ended: bool
    next: int


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a file and return its status; raise OpError unless it is a regular one."""
    _require_regular(path, os.stat(path))
    fd = os.open(path, _OPEN)
    found = os.fstat(fd)
    try:
        _require_regular(path, found)
    except OpError:
        os.close(fd)
        raise
    return fd, found


def _require_regular(path: str, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kind = kind_of(found.st_mode)
    hint = "use list_files to see what it holds" if kind == "directory" else "use exec for it"
    raise OpError("wrong_kind", f"{show(path)} is a {kind}, not a regular file: {hint}")


def read(call: OperationCall) -> dict[str, Any]:
    """Send a file's bytes, or a part of them."""
    path = resolve(call.text("path"))
    offset = call.number("offset", 0)
    length = call.number("length", BIGGEST)
    most = call.number("max_bytes", BIGGEST)
    fd, found = open_regular(path)
    with closing_fd(fd):
        # Files of /proc have content but no size; a file that grows is read up to its size now.
        known = max(found.st_size - offset, 0) if found.st_size else MAX_SIZELESS
        wanted = min(length, known)
        if wanted > most:
            raise OpError(
                "too_large",
                f"{show(path)} has {found.st_size} bytes, of which at most {most} can be read at "
                "once: read it in parts with offset and length",
            )
        sent = send(fd, call.stdout, offset, wanted)
    return {"size": found.st_size, "sent": sent}


def read_lines(call: OperationCall) -> dict[str, Any]:
    """Send some lines of a text file, a whole image, or the first bytes of anything else."""
    path = resolve(call.text("path"))
    offset = call.number("offset", 1, low=1)
    limit = call.number("limit", 2000, low=1, high=1_000_000)
    max_bytes = call.number("max_bytes", 30_000, low=1, high=16 * 1024 * 1024)
    fd, found = open_regular(path)
    with closing_fd(fd):
        head = os.pread(fd, _HEAD, 0)
        facts = {"path": relativize(path), "size": found.st_size}
        mime = image_type(head)
        if mime and found.st_size <= MAX_IMAGE:
            send(fd, call.stdout, 0, found.st_size)
            return {**facts, "kind": "image", "mime": mime}
        if mime or not is_text(head):
            put(call.stdout, head[:FIRST_BYTES])
            return {**facts, "kind": "binary", "mime": mime or "application/octet-stream"}
        data, part = _read_part(fd, path, offset, limit, max_bytes)
        put(call.stdout, data)
    return {**facts, "kind": "text", "mime": "text/plain", **part}


def image_type(head: bytes) -> str | None:
    """Return the MIME type of an image that models can see, by its first bytes."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def is_text(head: bytes) -> bool:
    """Return whether a file that begins so is text: no NUL, few invalid characters."""
    if b"\0" in head or head.startswith(_NO_TEXT):
        return False
    decoded = head.decode("utf-8", "replace")
    return decoded.count("\ufffd") <= max(len(decoded) * 3 // 10, 1)


def _read_part(
    fd: int, path: str, offset: int, limit: int, max_bytes: int
) -> tuple[bytes, dict[str, Any]]:
    """Return at most `limit` lines from the 1-based `offset` on, and facts about them.

    Together they have at most `max_bytes`, but there is always one.
    """
    start, before = _skip(fd, offset - 1)
    lines: list[bytes] = []
    size = long_lines = 0
    for line in split(fd, start, _MAX_LINE * 4 + 2):
        text, was_cut = _tidy(line, first=start == 0)
        if len(lines) >= limit or (lines and size + len(text) > max_bytes):
            break
        lines.append(text)
        size += len(text)
        long_lines += was_cut
        start = line.next
    if not lines and offset > 1:
        has = f"has {before} lines" if before else "is empty"
        raise OpError(
            "invalid", f"{show(path)} {has}, so line {offset} is past its end: start earlier"
        )
    more, rest = _rest(fd, start)
    return b"".join(lines), {
        "first_line": offset,
        "lines": len(lines),
        "total_lines": None if rest is None else offset - 1 + len(lines) + rest,
        "more": more,
        "long_lines_cut": long_lines,
    }


def _tidy(line: Line, *, first: bool) -> tuple[bytes, bool]:
    """Return the line as valid UTF-8 without CR and byte order mark; whether it was cut."""
    text = line.head.decode("utf-8", "replace")
    if line.length == len(line.head):
        text = text.removesuffix("\r")
    if first:
        text = text.removeprefix("\ufeff")
    was_cut = len(text) > _MAX_LINE
    return text[:_MAX_LINE].encode() + (b"\n" if line.ended else b""), was_cut


def split(fd: int, start: int, keep: int) -> Iterator[Line]:
    """Yield the lines from byte `start` on, with at most `keep` bytes of each."""
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
    """Return the start of the line after the first `count` lines, and how many there were."""
    where = passed = 0
    last = b"\n"
    while passed < count and (chunk := os.pread(fd, _CHUNK, where)):
        here = chunk.count(b"\n")
        if passed + here >= count:
            return where + len(chunk) - len(chunk.split(b"\n", count - passed)[-1]), count
        passed += here
        where += len(chunk)
        last = chunk[-1:]
    return where, passed + (last != b"\n")


def _rest(fd: int, start: int) -> tuple[bool, int | None]:
    """Return whether anything follows `start`, and how many lines; None if counting takes long."""
    where, newlines = start, 0
    last = b"\n"
    while chunk := os.pread(fd, _CHUNK, where):
        newlines += chunk.count(b"\n")
        last = chunk[-1:]
        where += len(chunk)
        if where - start > _CHEAP:
            return True, None
    return where > start, newlines + (last != b"\n")
