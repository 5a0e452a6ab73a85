"""Moves bytes between pipes and files, with memory bounded by one chunk."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK = 256 * 1024
MAX_ROWS = 8 * 1024 * 1024


def chunks(source: int) -> Iterator[bytes]:
    """What `source` holds, until its end."""
    while data := os.read(source, CHUNK):
        yield data


def until(source: int, end: bytes) -> Iterator[bytes]:
    """What `source` holds before `end`, its last bytes.

    Raises:
        OpError: it was closed without them: whoever fed it has died, and more was to come.
    """
    kept = b""
    for data in chunks(source):
        kept += data
        # What is shorter is used when it is whole, not before: so an append happens at once.
        if len(kept) > CHUNK + len(end):
            yield kept[: len(kept) - len(end)]
            kept = kept[len(kept) - len(end) :]
    if not kept.endswith(end):
        raise OpError("cancelled", "the body did not come whole")
    if rest := kept[: len(kept) - len(end)]:
        yield rest


def take(source: Iterable[bytes], limit: int) -> bytes:
    """Everything in `source`.

    Raises:
        OpError: it is over `limit` bytes.
    """
    parts, size = [], 0
    for data in source:
        parts.append(data)
        size += len(data)
        if size > limit:
            raise OpError("too_large", f"more than {limit} bytes were given: send less at once")
    return b"".join(parts)


def put(target: int, data: bytes) -> int:
    """Write all of `data`; returns its size."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]
    return len(data)


def copy(source: Iterable[bytes], target: int) -> int:
    """Write all of `source` to `target`; returns the size."""
    return sum(put(target, data) for data in source)


def send(source: int, target: int, start: int, length: int) -> int:
    """Write `length` bytes of a file from `start`, or fewer if it ends; returns how many."""
    sent = 0
    try:
        while sent < length:
            step = os.sendfile(target, source, start + sent, min(length - sent, 64 * CHUNK))
            if step == 0:
                break
            sent += step
    except BrokenPipeError:
        raise
    except OSError:
        # Files of /proc and some file systems cannot feed a pipe directly.
        sent += _send_by_reading(source, target, start + sent, length - sent)
    return sent


def _send_by_reading(source: int, target: int, start: int, length: int) -> int:
    sent = 0
    while sent < length and (data := os.pread(source, min(length - sent, CHUNK), start + sent)):
        sent += put(target, data)
    return sent


def put_rows(target: int, rows: Iterable[object], limit: int) -> int:
    """Write rows as a JSON array, at most `limit` and 8 MiB; returns how many."""
    texts: list[str] = []
    size = 0
    for row in rows:
        text = json.dumps(row)
        size += len(text)
        if len(texts) == limit or size > MAX_ROWS:
            break
        texts.append(text)
    put(target, f"[{','.join(texts)}]".encode())
    return len(texts)
