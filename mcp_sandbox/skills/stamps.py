"""Tells whether a file or folder is as it was, without opening it."""

import os

Stamp = tuple[int, int, int, int, int]
"""Device, inode, time of the last change of content, of anything, and bytes."""

# How far the clock of a file system may lag behind: a tick of the kernel, or two seconds where
# it keeps whole seconds only.
_TICK_NS = 50_000_000
_WHOLE_SECONDS_NS = 2_000_000_000


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file or folder; any edit changes it, unless it is not settled."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
    )


def is_settled(stamp: Stamp, now_ns: int) -> bool:
    """Whether a change after `now_ns` (since the epoch) would show in the stamp.

    It would not if the last change is so recent that the next may get the same time.
    """
    changed = stamp[3]
    resolution = _TICK_NS if changed % 1_000_000_000 else _WHOLE_SECONDS_NS
    return changed + resolution < now_ns
