"""A chat's files as one stream: out of a sandbox, and into an empty one."""

import time
from collections.abc import AsyncIterator
from functools import partial

from benchmarks.measure import Goal, Measured, Row
from benchmarks.places import checked, open_sandbox

_MADE = """
for d in $(seq 200); do mkdir -p $d; head -c 1075000 /dev/urandom | split -a2 -b10750 - $d/; done
find . -type f | wc -l
"""
_GONE = "find . -mindepth 1 -delete"


async def _archive(pairs: int, *, out: bool) -> Measured:
    """The seconds of each run; the stream stays in memory, as a store would cost its own time."""
    async with open_sandbox("bubblewrap") as sandbox:
        files, exec_ = sandbox.runtime.files, sandbox.runtime.exec
        checked(await exec_(_MADE), "20000\n")
        taken: list[float] = []
        for _ in range(pairs):
            pieces: list[bytes] = []
            began = time.perf_counter()
            await files.pack(partial(_keep, pieces), roots=["workspace", "home"])
            packed = time.perf_counter()
            checked(await exec_(_GONE), "")
            cleared = time.perf_counter()
            await files.unpack(_given(pieces), max_bytes=1 << 30)
            taken.append(packed - began if out else time.perf_counter() - cleared)
    return Measured(tuple(taken))


async def _keep(pieces: list[bytes], data: bytes) -> None:
    pieces.append(data)


async def _given(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


_WHAT = "20,000 files of 215 MB, seconds, bubblewrap"
ROWS = (
    Row("pack", f"pack {_WHAT}", "", Goal(8, "s"), partial(_archive, out=True), pairs=5),
    Row("unpack", f"unpack {_WHAT}", "", Goal(8, "s"), partial(_archive, out=False), pairs=5),
)
