"""Tell from a picture's bytes whether a model can be shown it. Pure functions.

A model's service refuses a damaged or giant picture, and the refused block stays in the chat. The
bytes are hostile: nothing is decoded, and at most `_MAX_PARTS` parts of a file are looked at.
"""

import re
import struct
import zlib
from shlex import quote
from typing import NamedTuple

from mcp_sandbox.runner.files.reading import MAX_IMAGE, image_type

MAX_SIDE = 8_000
_MAX_PARTS = 50_000
# What begins a part of a JPEG: neither an escaped byte of data nor a point to restart from.
_MARK = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


class Picture(NamedTuple):
    """A picture's type and pixels; `fault` says why no model can be shown it, empty if one can."""

    mime: str
    width: int = 0
    height: int = 0
    fault: str = ""


def inspect(path: str, data: bytes, size: int) -> Picture:
    """What a file of `size` bytes is; `data` holds all of them, or the first of too many."""
    mime = image_type(data) or "application/octet-stream"
    if size > MAX_IMAGE:
        return Picture(mime, fault=f"over {MAX_IMAGE:,} bytes; {_smaller_copy(path)}")
    try:
        width, height = _MEASURES[mime](data)
    except (struct.error, LookupError, ValueError, StopIteration):
        return Picture(mime, fault="it is damaged or not whole")
    fault = "" if width and height else "it has no pixels"
    if max(width, height) > MAX_SIDE:
        fault = f"over {MAX_SIDE:,} pixels a side; {_smaller_copy(path)}"
    return Picture(mime, width, height, fault)


def _smaller_copy(path: str) -> str:
    return (
        "for a smaller copy, where Pillow or ImageMagick is installed:\n"
        'python3 -c "import sys; from PIL import Image as I; I.MAX_IMAGE_PIXELS = None; '
        "i = I.open(sys.argv[1]); i.thumbnail((1500, 1500)); i.convert('RGB').save(sys.argv[2])\" "
        "{0} {1} || convert {0}'[0]' -resize '1500x1500>' {1}"
    ).format(quote(path), quote(f"{path.rpartition('/')[2]}.small.jpg"))


def _png(data: bytes) -> tuple[int, int]:
    at, kinds = 8, [b""]
    while kinds[-1] != b"IEND" and len(kinds) < _MAX_PARTS:
        length, kind = struct.unpack_from(">I4s", data, at)
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if checksum != zlib.crc32(memoryview(data)[at + 4 : at + 8 + length]):
            raise ValueError
        kinds.append(kind)
        at += 12 + length
    if (
        kinds[1] != b"IHDR"
        or data[24] not in (1, 2, 4, 8, 16)
        or data[25] not in (0, 2, 3, 4, 6)
        or b"IDAT" not in kinds
        or kinds[-1] != b"IEND"
    ):
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    at, marks, size = 2, set(), (0, 0)
    for _ in range(_MAX_PARTS):
        found = next(_MARK.finditer(data, at))
        marks.add(mark := found[0][1])
        # Its end, its data, and the two kinds of tables without which they cannot be read.
        if mark == 0xD9 and marks >= {0xDA, 0xC4, 0xDB}:
            return size
        length, depth, height, width = struct.unpack_from(">HBHH", data, found.end())
        if 0xC0 <= mark <= 0xC2 and depth == 8:
            size = width, height
        at = found.end() + length
    raise ValueError


def _gif(data: bytes) -> tuple[int, int]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, in_blocks, frames = 13 + (flags >> 7) * (6 << (flags & 7)), False, 0
    for _ in range(_MAX_PARTS):
        kind = data[at]
        if in_blocks:
            at, in_blocks = at + 1 + kind, kind > 0
            continue
        if kind == 0x3B and frames:
            return width, height
        if kind not in (0x21, 0x2C):
            break
        at, in_blocks = at + 2, True
        if kind == 0x2C:
            flags, frames = data[at + 7], frames + 1
            at += 9 + (flags >> 7) * (6 << (flags & 7))
    raise ValueError


def _webp(data: bytes) -> tuple[int, int]:
    whole, kind = struct.unpack_from("<I4x4s", data, 4)
    if len(data) < max(30, 8 + whole) or not _WEBP_BEGINS.match(data, 12):
        raise ValueError
    start, apart, bits, less = _WEBP[kind]
    both = int.from_bytes(data[start:30], "little")
    width, height = (each % (1 << bits) + less for each in (both, both >> apart))
    return width, height


# Where a WebP has its two sides, and how many bits apart, long and too low by one they are.
_WEBP = {b"VP8 ": (26, 16, 14, 0), b"VP8L": (21, 14, 14, 1), b"VP8X": (24, 24, 24, 1)}
# The first frame as each kind begins it; an extended file holds one of the others.
_WEBP_BEGINS = re.compile(rb"(?s)VP8 .{7}\x9d\x01\x2a|VP8L.{4}/|VP8X.*?(?:VP8[ L]|ANMF)")
_MEASURES = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}
