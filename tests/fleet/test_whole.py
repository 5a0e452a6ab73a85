"""What takes minutes: a Redis that hangs, and a server that is killed again and again."""

import logging
import random
import signal
import time
from pathlib import Path

import anyio
import httpx2
import pytest

from tests.fleet.machines import LEASE_S, Fleet, Machine, fleet
from tests.fleet.test_fleet import DISAGREE, ticks, until_refused, works

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.redis,
    pytest.mark.s3,
    pytest.mark.bubblewrap,
    pytest.mark.alone,
    pytest.mark.whole,
    pytest.mark.timeout(900),
]
CHATS, CALLS, KILL_EVERY_S = 16, 2000, 10.0


async def test_a_redis_that_hangs_for_a_minute_never_has_two_servers_run_a_chat(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, lease_s=30) as two:
        session = await two.a.prepare("hung")
        await two.a.run(session["id"], "echo kept > note")
        await two.a.saved(session["id"])
        told: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_refused, two.a, session["id"], told)
            while not (two.a.files("hung") / "tick").exists():
                await anyio.sleep(0.02)
            two.redis.strike(signal.SIGSTOP)
            began, struck = time.monotonic(), time.time_ns()
            while time.monotonic() - began < 60:
                # One that is passed on to the server which has it still is answered there.
                is_answered = await works(two.b, session["id"])
                assert not (is_answered and told)
                await anyio.sleep(0.5)
            last_s = (max(ticks(two.a, "hung")) - struck) / 1e9
            two.redis.strike(signal.SIGCONT)
            began = time.monotonic()
            while not await works(two.b, session["id"]):
                await anyio.sleep(0.1)
        back_s, where = time.monotonic() - began, await two.has("hung")
        logger.info(
            "ended %.1f s after Redis hung (lease 30 s); at %s again %.1f s after it went on: %s",
            last_s, where, back_s, told[0],
        )  # fmt: skip
        assert last_s < 30
        assert DISAGREE in told[0]
        assert await two.a.run(session["id"], "cat note") == "kept\n"


class Writer:
    """Writes growing numbers in one chat, by whatever server answers; counts what was lost."""

    def __init__(self, two: Fleet, number: int) -> None:
        self.two, self.name = two, f"chat{number}"
        self.acknowledged: list[int] = []
        # What was in a backup.
        self.covered: set[int] = set()
        self.calls = self.told = self.refused = 0

    async def run(self, calls: int) -> None:
        while self.calls < calls:
            machine = random.choice([self.two.a, self.two.b])
            self.calls += 1
            try:
                await self._write(machine, self.calls)
            except (RuntimeError, AssertionError, httpx2.TransportError):
                self.refused += 1
                await anyio.sleep(0.3)

    async def _write(self, machine: Machine, number: int) -> None:
        session = await machine.prepare(self.name)
        if is_saved := number % 8 == 0:
            await machine.saved(session["id"])
        result = await machine.answer(session["id"], f"echo {number} >> numbers; cat numbers")
        if is_saved:
            self.covered |= {int(each) for each in result["data"]["stdout"].split()} - {number}
        self.told += sum("is lost" in each or "as of" in each for each in result.get("notices", ()))
        self.acknowledged.append(number)


async def test_no_write_vanishes_untold_and_nothing_is_left(tmp_path: Path) -> None:
    async with fleet(tmp_path, settings={"MCP_SANDBOX_SESSIONS__MAX_PER_USER": f"{CHATS}"}) as two:
        writers = [Writer(two, number) for number in range(CHATS)]
        over = anyio.Event()
        kills = 0

        async def kill() -> None:
            nonlocal kills
            while not over.is_set():
                with anyio.move_on_after(KILL_EVERY_S):
                    await over.wait()
                    return
                victim = (two.b, two.a)[kills % 2]
                await victim.kill()
                kills += 1
                # Every other one comes back before its leases are over.
                await anyio.sleep(0 if kills % 4 < 2 else 1.5 * LEASE_S)
                await victim.start()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            async with anyio.create_task_group() as writing:
                for writer in writers:
                    writing.start_soon(writer.run, CALLS // CHATS)
            over.set()
        lost = {}
        for writer in writers:
            session = await two.a.prepare(writer.name)
            text = await two.a.run(session["id"], "cat numbers || true")
            there = {int(each) for each in text.split()}
            assert writer.covered <= there
            missing = {*writer.acknowledged} - there
            lost[writer.name] = len(missing), writer.told
        logger.info(
            "%d calls, %d refused, %d kills; lost and told by chat: %s",
            sum(writer.calls for writer in writers),
            sum(writer.refused for writer in writers),
            kills,
            lost,
        )
        assert kills
        assert all(told for missing, told in lost.values() if missing)
