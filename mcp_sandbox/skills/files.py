"""Reads single files of a skill, whole or not at all. Blocking."""

import os
import time
from typing import NamedTuple

from mcp_sandbox.errors import Busy, TooLarge
from mcp_sandbox.skills.stamps import Stamp, is_settled, stamp_of
from mcp_sandbox.workspace.beneath import open_file

MAX_BYTES = 16 * 1024 * 1024
"""A skill may have so much in all, and no single file more."""
_ATTEMPTS = 3
_CHUNK = 1024 * 1024


class Whole(NamedTuple):
    """A file's bytes, its stamp from before they were read, and when that was (since the epoch)."""

    data: bytes
    stamp: Stamp
    read_at_ns: int


def read_whole(directory: int, path: str) -> Whole:
    """Read a regular file beneath an open folder, following no link.

    Who rewrites it in place and pauses in the middle cannot be told from who has ended.

    Raises:
        OSError: there is none.
        TooLarge: it is over the limit.
        Busy: it changes all the time.
    """
    for _ in range(_ATTEMPTS):
        file = open_file(directory, os.fsencode(path))
        try:
            now = time.time_ns()
            before = stamp_of(os.fstat(file))
            data = _all(file, path)
            # A stamp that is not settled would not show an edit: the same bytes twice do.
            same = is_settled(before, now) or _all(file, path) == data
            if same and stamp_of(os.fstat(file)) == before:
                return Whole(data, before, now)
        finally:
            os.close(file)
    raise Busy(f"{path} changes while it is read: try again when it is written")


def read_beginning(directory: int, path: str, size: int) -> bytes:
    """The first bytes of a regular file beneath an open folder, following no link.

    Raises:
        OSError: there is none.
    """
    file = open_file(directory, os.fsencode(path))
    try:
        return os.read(file, size)
    finally:
        os.close(file)


def _all(file: int, path: str) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    chunks: list[bytes] = []
    left = MAX_BYTES + 1
    while left > 0 and (chunk := os.read(file, min(left, _CHUNK))):
        chunks.append(chunk)
        left -= len(chunk)
    if left <= 0:
        raise TooLarge(f"{path} has more than {MAX_BYTES // 1024 // 1024} MiB: it is not offered")
    return b"".join(chunks)
