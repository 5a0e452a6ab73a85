"""Tells that skills changed, once for each burst of edits.

Folders are looked at again and again rather than watched by the kernel: that works on every file
system and through every mount, needs no watch for each folder, and a program that writes
thousands of files next to a skill causes no more than the next look does. A look costs a stat or
two for each skill. Nobody looks when nobody waits.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import anyio

from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import Change

Look = Callable[[float], Awaitable[Catalogue]]
"""Gives what is offered, no longer ago than so many seconds."""

# A look that takes long is repeated more seldom, so that no more than this part of one CPU goes
# into looking.
_MAX_SHARE = 0.05


@dataclass(frozen=True)
class Pace:
    """How often it is looked, how long edits must have rested, and how long that is waited for."""

    poll_s: float = 1.0
    settle_s: float = 1.0
    patience_s: float = 10.0


@asynccontextmanager
async def watched(look: Look, pace: Pace) -> AsyncGenerator[AsyncIterator[Change]]:
    """What changes from now on."""
    async with aclosing(_changes(look, await look(0.0), pace)) as changes:
        yield changes


async def _changes(look: Look, before: Catalogue, pace: Pace) -> AsyncGenerator[Change]:
    pause = pace.poll_s
    while True:
        await anyio.sleep(pause)
        began = time.monotonic()
        now = await look(pace.poll_s / 2)
        pause = max(pace.poll_s, (time.monotonic() - began) / _MAX_SHARE)
        if now is not before and now.change_since(before):
            now = await _rested(look, now, pace)
            if change := now.change_since(before):
                yield change
        before = now


async def _rested(look: Look, catalogue: Catalogue, pace: Pace) -> Catalogue:
    with anyio.move_on_after(pace.patience_s):
        while True:
            await anyio.sleep(pace.settle_s)
            now = await look(0.0)
            if now is catalogue or not now.change_since(catalogue):
                return now
            catalogue = now
    return catalogue
