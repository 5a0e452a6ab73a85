"""The frames of a terminal, between a person's keyboard and the shell: kind, length, bytes.

    d   what was typed (nothing: its end), or what is to be shown
    s   what is to be shown on standard error
    r   the size: rows and columns, two big-endian 16-bit numbers
    x   the end: a JSON object
    e   the end by an error: its text

Standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

DATA, STDERR, SIZE, END, ERROR = b"d", b"s", b"r", b"x", b"e"
MAX_BYTES = 64 * 1024
_HEAD = struct.Struct(">cI")
_SIZE = struct.Struct(">HH")


class FrameError(Exception):
    """The bytes are not a frame."""


def frame(kind: bytes, data: bytes) -> bytes:
    """Encode one frame; `data` has at most MAX_BYTES."""
    return _HEAD.pack(kind, len(data)) + data


def frames(data: bytes) -> Iterator[bytes]:
    """Encode `data` of any length as DATA frames."""
    for start in range(0, len(data), MAX_BYTES):
        yield frame(DATA, data[start : start + MAX_BYTES])


def size(rows: int, columns: int) -> bytes:
    """Encode the size of the person's terminal."""
    return frame(SIZE, _SIZE.pack(min(rows, 65535), min(columns, 65535)))


def rows_and_columns(data: bytes) -> tuple[int, int]:
    """Decode the data of a SIZE frame; raise FrameError if it is malformed."""
    try:
        rows, columns = _SIZE.unpack(data)
    except struct.error as exc:
        raise FrameError("no size") from exc
    return rows, columns


class Frames:
    """Finds the frames in a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind and bytes of each complete frame; raise FrameError if one is malformed."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer)
            if kind not in (DATA, STDERR, SIZE, END, ERROR) or length > MAX_BYTES:
                raise FrameError("no frame")
            whole = _HEAD.size + length
            if len(self._buffer) < whole:
                return
            content = bytes(self._buffer[_HEAD.size : whole])
            del self._buffer[:whole]
            yield kind, content
