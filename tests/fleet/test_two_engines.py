"""Two servers on two engines, each in a network of its own, and a cable that is pulled."""

import logging
import time
from collections.abc import AsyncGenerator
from functools import partial

import anyio
import httpx2
import pytest
from anyio import to_thread

from tests.fleet.machines import LEASE_S, Fleet, Machine, on_engines
from tests.fleet.networks import Network
from tests.fleet.test_fleet import eventually, ticks, until_refused, works

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.redis,
    pytest.mark.s3,
    pytest.mark.docker,
    pytest.mark.xdist_group("fleet"),
    pytest.mark.timeout(120),
]
TREE = "mkdir -p d/e && for n in 1 2 3; do head -c 90000 /dev/urandom > d/e/$n; done; ln -s e d/l"
SUMS = "find . -type f -exec md5sum {} + -o -type l -printf '%p %l\\n' | sort"


@pytest.fixture(scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str, network: Network
) -> AsyncGenerator[Fleet]:
    async with on_engines(tmp_path_factory.mktemp("engines"), network) as found:
        yield found


def containers(machine: Machine) -> set[str]:
    """The containers on a machine's engine, where tests before may have left some."""
    assert machine.host.engine
    return {*machine.host.engine.client("ps", "-aq").stdout.decode().split()}


async def test_a_dead_servers_chat_goes_on_at_another_with_all_saved_files(two: Fleet) -> None:
    left = containers(two.a)
    session = await two.a.prepare("dead")
    before = await two.a.run(session["id"], f"{TREE}; {SUMS}")
    await two.a.saved(session["id"])
    await two.a.kill()
    began = time.monotonic()
    assert await two.b.run(session["id"], SUMS) == before
    took_s = time.monotonic() - began
    logger.info("killed: taken over after %.1f s, lease %g s", took_s, LEASE_S)
    assert took_s < LEASE_S + 3
    assert await two.has("dead") == "b"
    # What the dead one left running ends when it is back.
    await two.a.start()
    await eventually(partial(has_only, two.a, left))
    assert await two.a.run(session["id"], SUMS) == before


async def has_only(machine: Machine, left: set[str]) -> bool:
    return await to_thread.run_sync(containers, machine) <= left


async def test_a_server_whose_cable_is_pulled_runs_nothing_when_another_does(
    two: Fleet, network: Network
) -> None:
    left = containers(two.a)
    session = await two.a.prepare("pulled")
    before = await two.a.run(session["id"], f"{TREE}; {SUMS}")
    await two.a.saved(session["id"])
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_refused, two.a, session["id"], told)
        tasks.start_soon(passed_on_until_lost, two.b, session["id"], told)
        await eventually(partial(has_ticked, two.a))
        await to_thread.run_sync(partial(network.plug, two.a.host, in_=False))
        began = time.monotonic()
        assert await two.b.run(session["id"], SUMS) == before
        took_s = time.monotonic() - began
        logger.info("unplugged: taken over after %.1f s, lease %g s", took_s, LEASE_S)
        assert took_s < LEASE_S + 3
        tasks.start_soon(until_refused, two.b, session["id"], told)
        await eventually(partial(has_ticked, two.b))
        await to_thread.run_sync(partial(network.plug, two.a.host, in_=True))
        await eventually(partial(works, two.a, session["id"]))
        assert await two.has("pulled") == "b"
        await eventually(partial(has_only, two.a, left))
        await two.b.ask("POST", f"sandbox/{session['id']}/terminate")
    assert len(told) == 3
    assert max(ticks(two.a, "pulled")) < min(ticks(two.b, "pulled"))


async def passed_on_until_lost(machine: Machine, session_id: str, told: list[str]) -> None:
    """A call that goes on at the machine which is cut off ends for its client nevertheless."""
    with pytest.raises((httpx2.RemoteProtocolError, RuntimeError)) as lost:
        await machine.run(session_id, "echo begun; sleep 300")
    told.append(str(lost.value))


async def has_ticked(machine: Machine) -> bool:
    return (machine.files("pulled") / "tick").exists()
