"""Relays under load while their daemon is killed again and again."""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import Place, place
from tests.relay.relays import Relay, relayed
from tests.relay.test_starting import daemon_pid, ending, gone

KILLS = 5
RELAYS = 3


class Book:
    """What clients asked for, and what they were told of it."""

    def __init__(self) -> None:
        self.asked = 0
        self.acknowledged = Counter[int]()
        self.unknown = Counter[int]()
        self.refused = Counter[int]()
        self.closed = False

    async def keep(self, relay: Relay) -> None:
        """Make one call after another until the book is closed; each must be answered."""
        while not self.closed:
            number = self.asked
            self.asked += 1
            answer = await relay.answer(await relay.start_call(f"echo {number} >> calls"))
            if "result" in answer:
                self.acknowledged[number] += 1
            elif "nothing ran" in answer["error"]["message"]:
                # The daemon was killed before it listened: no other is tried for a while.
                self.refused[number] += 1
                await anyio.sleep(0.1)
            else:
                assert "ended during this call" in answer["error"]["message"]
                self.unknown[number] += 1
        await relay.close_input()
        assert await relay.ended() == ([], 0)


@pytest.mark.slow
async def test_no_call_runs_twice_and_none_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    here, book = place(tmp_path), Book()
    async with relayed(here, "--chat", "c") as first, ending(here):
        assert "result" in await first.answer(await first.start_call("touch calls"))
        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                for older in range(RELAYS):
                    tasks.start_soon(client, here, book, bool(older % 2))
                await kill_daemons(here, book)
                book.closed = True
        # Whoever is left has a daemon again, which still has the files.
        assert "result" in await first.answer(await first.start_call("ls calls"))
    (calls,) = here.data.glob("sandbox/workspace/**/calls")
    ran = Counter(map(int, calls.read_text().split()))
    assert set(ran.values()) == {1}
    assert book.acknowledged.keys() <= ran.keys()
    assert not book.refused.keys() & ran.keys()
    assert (book.acknowledged + book.unknown + book.refused).total() == book.asked
    assert book.acknowledged.total() >= KILLS


async def client(here: Place, book: Book, older: bool) -> None:
    async with relayed(here, "--chat", "c") as relay:
        if older:
            await relay.initialize()
        await book.keep(relay)


async def kill_daemons(here: Place, book: Book) -> None:
    for _ in range(KILLS):
        before = book.acknowledged.total()
        while book.acknowledged.total() == before:
            await anyio.sleep(0.01)
        await anyio.sleep(random.uniform(0, 0.3))
        pid = await one_that_answers(here)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
    await one_that_answers(here)


async def one_that_answers(here: Place) -> int:
    """The daemon's process, once the relays have started one."""
    while True:
        try:
            return await daemon_pid(here)
        except (OSError, anyio.IncompleteRead, anyio.BrokenResourceError):
            await anyio.sleep(0.01)
