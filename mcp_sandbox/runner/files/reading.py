"""Reads files of any size: as bytes, or as numbered lines of any length, in bounded memory."""

from __future__ import annotations

import codecs
import os
import re
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from mcp_sandbox.runner.files.call import BIGGEST, CHUNK, closing_fd, put, send
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
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# These can look like text.
_NO_TEXT = (b"%PDF-", *_UTF_16)
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
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
            mime = mime or "application/octet-stream"
            return {**facts, "kind": "binary", "mime": mime, "encoding": guess_encoding(head)}
        data, part = _read_part(fd, path, offset, limit, max_bytes)
        put(call.stdout, data)
    return {**facts, "kind": "text", "mime": "text/plain", **part}


def image_type(head: bytes) -> str | None:
    """Return the MIME type of an image that models can see, by its first bytes."""
    kinds = rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8[79]a)"
    found = re.match(kinds + rb"|(?P<webp>RIFF(?s:.{4})WEBP)", head)
    return f"image/{found.lastgroup}" if found else None


def is_text(head: bytes) -> bool:
    """Return whether a file that begins so is text: no NUL, few invalid characters."""
    if b"\0" in head or head.startswith(_NO_TEXT):
        return False
    decoded = head.decode("utf-8", "replace")
    return decoded.count("\ufffd") <= max(len(decoded) * 3 // 10, 1)


def guess_encoding(data: bytes) -> str:
    """Guess by which of iconv's names to read what is not UTF-8: UTF-8 itself if most of it is.

    What is all UTF-8, or no text, has none. A whole chunk or more may end within a character.
    """
    if data.startswith(_UTF_16):
        return "UTF-16"
    text, used = codecs.utf_8_decode(data, "ignore", len(data) < CHUNK)
    odd = used - len(text.encode())
    if not odd or (not is_text(data[:_HEAD]) and _CONTROL.search(data[:_HEAD])):
        return ""
    if len(text) - len(text.encode("ascii", "ignore")) >= odd:
        return "UTF-8"
    runs = [run[0] for run, _ in zip(re.finditer(rb"[\x80-\xff]{1,64}", data), range(1000))]
    high = b"".join(runs)
    # Among Latin letters these stand alone; Russian ones begin at 0xC0, in two arrangements.
    latin = 2 * len(high) < 5 * len(runs)
    if latin or 10 * sum(byte < 0xC0 for byte in high) > len(high):
        return "WINDOWS-1252" if latin else "GB18030"
    return "WINDOWS-1251" if 2 * sum(byte >= 0xE0 for byte in high) > len(high) else "KOI8-R"


def _read_part(
    fd: int, path: str, offset: int, limit: int, max_bytes: int
) -> tuple[bytes, dict[str, Any]]:
    """Return at most `limit` lines from the 1-based `offset` on, and facts about them.

    Together they have at most `max_bytes`, but there is always one.
    """
    begin, before = _skip(fd, offset - 1)
    lines: list[bytes] = []
    start, size, long_lines = begin, 0, 0
    for line in split(fd, start, _MAX_LINE * 4 + 5):
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
    end, rest = _skip(fd, BIGGEST, start, _CHEAP)
    shown = os.pread(fd, min(start - begin, _CHUNK), begin)
    return b"".join(lines), {
        "first_line": offset,
        "lines": len(lines),
        "total_lines": None if end - start > _CHEAP else offset - 1 + len(lines) + rest,
        "more": end > start,
        "long_lines_cut": long_lines,
        # How the file begins says more than a few lines.
        "encoding": guess_encoding(shown) and guess_encoding(shown + os.pread(fd, _CHUNK, 0)),
    }


def _tidy(line: Line, *, first: bool) -> tuple[bytes, bool]:
    r"""Return the line without CR and byte order mark, as UTF-8 and `\xe9`; whether it was cut."""
    text = line.head.decode("utf-8", "backslashreplace")
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


def _skip(fd: int, count: int, start: int = 0, most: int = BIGGEST) -> tuple[int, int]:
    """Return the place after `count` lines from `start` on, and how many there were.

    After `most` bytes, or somewhat more, it looks no further.
    """
    where, passed, last = start, 0, b"\n"
    while passed < count and where - start <= most and (chunk := os.pread(fd, _CHUNK, where)):
        here = chunk.count(b"\n")
        if passed + here >= count:
            return where + len(chunk) - len(chunk.split(b"\n", count - passed)[-1]), count
        passed += here
        where += len(chunk)
        last = chunk[-1:]
    return where, passed + (last != b"\n")
