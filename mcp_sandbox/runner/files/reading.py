"""Reads files: as bytes, or as numbered lines in bounded memory whatever the file's size."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import lines, pipes
from mcp_sandbox.runner.files.call import BIGGEST
from mcp_sandbox.runner.files.paths import relative, resolve, show
from mcp_sandbox.runner.files.walk import kind_of
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Call

MAX_IMAGE = 3_500_000
MAX_SIZELESS = 16 * 1024 * 1024
FIRST_BYTES = 256
_HEAD = 8192
# PDF and UTF-16 can look like text.
_NO_TEXT = (b"%PDF-", b"\xff\xfe", b"\xfe\xff")
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """An open regular file and what it is.

    Raises:
        OpError: it is a directory, fifo, socket or device.
    """
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


def read(call: Call) -> dict[str, Any]:
    """Send a file's bytes, or a part of them."""
    path = resolve(call.text("path"))
    offset = call.number("offset", 0)
    length = call.optional_number("length")
    most = call.number("max_bytes", BIGGEST)
    fd, found = open_regular(path)
    try:
        # Files of /proc have content but no size; a file that grows is read up to its size now.
        known = max(found.st_size - offset, 0) if found.st_size else MAX_SIZELESS
        wanted = known if length is None else min(length, known)
        if wanted > most:
            raise OpError(
                "too_large",
                f"{show(path)} has {found.st_size} bytes, of which at most {most} can be read at "
                "once: read it in parts with offset and length",
            )
        sent = pipes.send(fd, call.stdout, offset, wanted)
    finally:
        os.close(fd)
    return {"size": found.st_size, "sent": sent}


def read_lines(call: Call) -> dict[str, Any]:
    """Send some lines of a text file, a whole image, or the first bytes of anything else."""
    path = resolve(call.text("path"))
    cut = lines.Cut(
        offset=call.number("offset", 1, low=1),
        limit=call.number("limit", 2000, low=1, high=1_000_000),
        max_bytes=call.number("max_bytes", 30_000, low=1, high=16 * 1024 * 1024),
        max_line=call.number("max_line", 2000, low=1, high=1_000_000),
    )
    fd, found = open_regular(path)
    try:
        head = os.pread(fd, _HEAD, 0)
        facts = {"path": relative(path), "size": found.st_size}
        mime = image_type(head)
        if mime and found.st_size <= MAX_IMAGE:
            pipes.send(fd, call.stdout, 0, found.st_size)
            return {**facts, "kind": "image", "mime": mime}
        if mime or not is_text(head):
            pipes.put(call.stdout, head[:FIRST_BYTES])
            return {**facts, "kind": "binary", "mime": mime or "application/octet-stream"}
        part = _lines(fd, cut, path)
        pipes.put(call.stdout, part.data)
    finally:
        os.close(fd)
    return {**facts, "kind": "text", "mime": "text/plain", **_facts(part, cut)}


def _lines(fd: int, cut: lines.Cut, path: str) -> lines.Part:
    part = lines.read_part(fd, cut)
    if part.lines or cut.offset == 1:
        return part
    has = f"has {part.total} lines" if part.total else "is empty"
    raise OpError(
        "invalid", f"{show(path)} {has}, so line {cut.offset} is past its end: start earlier"
    )


def _facts(part: lines.Part, cut: lines.Cut) -> dict[str, Any]:
    return {
        "first_line": cut.offset,
        "lines": part.lines,
        "total_lines": part.total,
        "more": part.more,
        "long_lines_cut": part.long_lines_cut,
    }


def image_type(head: bytes) -> str | None:
    """The MIME type of an image that models can see, told from its first bytes."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def is_text(head: bytes) -> bool:
    """Whether a file that begins so is best shown as text: no NUL, hardly a broken character."""
    if b"\0" in head or head.startswith(_NO_TEXT):
        return False
    decoded = head.decode("utf-8", "replace")
    return decoded.count("\ufffd") <= max(len(decoded) * 3 // 10, 1)
