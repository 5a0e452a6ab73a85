"""What time it is, by the wall clock and by one that nobody can set.

{data root}/sandbox/clock    the last moment a process saw, and in which run of the machine
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from mcp_sandbox.workspace.retention import Moment, credible

Clock = Callable[[], Moment]


def system_clock() -> Moment:
    """Now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def recall(data_root: Path, now: Moment) -> Moment:
    """The last moment that was remembered since the machine started; `now` if none was. Blocking.

    What cannot be read or makes no sense is as good as none.
    """
    try:
        said = json.loads(_file(data_root).read_bytes())
        anchor = Moment(float(said["wall_s"]), float(said["steady_s"]))
        usable = said["boot"] == _boot() and anchor.steady_s <= now.steady_s
    except (OSError, ValueError, KeyError, TypeError):
        return now
    return anchor if usable else now


def remember(data_root: Path, now: Moment, anchor: Moment) -> None:
    """Keep `now`, as far as it can be believed, for the next process. Blocking.

    Raises:
        OSError: it cannot be written.
    """
    seen = credible(now, anchor)
    said = {"boot": _boot(), "wall_s": seen.wall_s, "steady_s": seen.steady_s}
    fresh = _file(data_root).with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(said))
    fresh.rename(_file(data_root))


def _file(data_root: Path) -> Path:
    return data_root / "sandbox" / "clock"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
