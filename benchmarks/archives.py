"""A chat's files as one stream: out of a sandbox, and into an empty one. Nothing is deleted."""

import time
from collections.abc import AsyncIterator
from functools import partial

from benchmarks.measure import Goal, Measured, Row
from benchmarks.places import CHAT, checked, open_in, open_place, outwait_deletions
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.files import Files

_MADE = """
for d in $(seq 200); do mkdir -p $d; head -c 1075000 /dev/urandom | split -a2 -b10750 - $d/; done
find . -type f | wc -l
"""


async def _archive(pairs: int, *, out: bool) -> Measured:
    """The seconds of each run; the stream stays in memory, as a store would cost its own time."""
    if not out:
        await outwait_deletions()
    async with open_place("bubblewrap") as place, open_in(place, CHAT) as sandbox:
        checked(await sandbox.runtime.exec(_MADE), "20000\n")
        taken: list[float] = []
        for number in range(pairs):
            began, pieces = time.perf_counter(), await _packed(sandbox.runtime.files)
            if not out:
                async with open_in(place, ChatId(CHAT.user, f"other-{number}")) as other:
                    began = time.perf_counter()
                    await other.runtime.files.unpack(_given(pieces), max_bytes=1 << 30)
                    taken.append(time.perf_counter() - began)
            else:
                taken.append(time.perf_counter() - began)
    return Measured(tuple(taken))


async def _packed(files: Files) -> list[bytes]:
    pieces: list[bytes] = []

    async def keep(data: bytes) -> None:
        pieces.append(data)

    await files.pack(keep, roots=["workspace", "home"])
    return pieces


async def _given(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


_WHAT = "20,000 files of 215 MB, seconds, bubblewrap"
ROWS = (
    Row("unpack", f"unpack {_WHAT}", "", Goal(8, "s"), partial(_archive, out=False), pairs=5),
    Row("pack", f"pack {_WHAT}", "", Goal(8, "s"), partial(_archive, out=True), pairs=5),
)
