"""Rounds of one fault: load, a blow at a random moment, and then the reckoning of all promises."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.config import load_config
from tests.daemon.running import control
from tests.e2e.endurance.chat import Chat
from tests.e2e.endurance.tally import Tally
from tests.e2e.endurance.worker import Worker
from tests.e2e.faults import blows, ground
from tests.e2e.faults.blows import Blow
from tests.e2e.faults.ground import ORPHANED_S, Ground
from tests.e2e.faults.runs import Starter, settle
from tests.e2e.faults.world import World

# A blow comes at any moment of this time, and load goes on for a part of it.
_LOAD_S = 0.8
_TRIES = 5
# A busy machine takes some seconds more to end what has had its time.
_GRACE_S = 30.0
_GONE_S = 60.0


@dataclass(frozen=True)
class Fault:
    """What is done, where, and on which backends it makes sense."""

    name: str
    blow: Blow
    ground: Callable[[str, Path | None], AbstractContextManager[Ground]] = ground.folder
    backends: tuple[str, ...] = ("bubblewrap", "docker")
    # Whether processes run meanwhile: what else is struck ends them, or keeps them from starting.
    runs: bool = False


FAULTS = (
    Fault("client", blows.lose_client, runs=True),
    Fault("relay", blows.kill_relay, runs=True),
    Fault("daemon", blows.kill_daemon, ground.patient, runs=True),
    Fault("worker", blows.kill_worker, runs=True),
    Fault("notebook", blows.kill_notebook, runs=True),
    Fault("runner", blows.kill_runner, runs=True),
    Fault("sandbox", blows.kill_sandbox, runs=True),
    Fault("engine", blows.restart_engine, ground.own_machine, ("docker",)),
    Fault("disk", blows.fill_disk, ground.small_disk),
    Fault("daemons", blows.start_several),
    Fault("store", blows.ruin_store),
    Fault("clock", blows.jump, ground.set_clock),
)


@dataclass
class Report:
    """What one fault did. Times are the longest ones seen, in seconds."""

    fault: str
    backend: str
    tally: Tally = field(default_factory=Tally)
    blows: Counter[str] = field(default_factory=Counter[str])
    tries: Counter[int] = field(default_factory=Counter[int])
    working_s: float = 0.0
    unowned_s: float = 0.0
    left: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def broken(self) -> bool:
        return bool(self.tally.faults) or any(self.left.values())


async def run(
    faults: Sequence[Fault], backend: str, times: int, seed: int, parent: Path | None
) -> Report:
    """Strike so many times on a world of their own, and see that nothing is left of it.

    Faults that share a world are of one ground.
    """
    report = Report(", ".join(fault.name for fault in faults), backend)
    with faults[0].ground(backend, parent) as where:
        where.place.home.mkdir(exist_ok=True)
        world = World(where, Random(seed), report.tally)
        if where.clock:
            world.start_daemon("-m", "tests.e2e.faults.clocked", str(where.clock))
        try:
            async with anyio.create_task_group() as clients:
                for chat in world.chats:
                    clients.start_soon(chat.serve)
                await _begin(world)
                for fault in faults:
                    for _ in range(times):
                        await _round(world, fault, report)
                for chat in world.chats:
                    chat.stop()
        finally:
            with anyio.CancelScope(shield=True):
                await world.end()
        await _reckon(world, report)
    return report


async def _begin(world: World) -> None:
    """Every client has a file that it knows to be there."""
    async with anyio.create_task_group() as tasks:
        for worker in _all(world):
            tasks.start_soon(worker.step)


async def _round(world: World, fault: Fault, report: Report) -> None:
    struck = anyio.Event()
    await to_thread.run_sync(world.machine.note)
    async with anyio.create_task_group() as load:
        for each in [*_all(world), *(world.starters if fault.runs else ())]:
            load.start_soon(_work_until, each, struck)
        await anyio.sleep(world.random.uniform(0.0, _LOAD_S))
        what = await fault.blow(world)
        report.blows[what] += 1
        over = time.monotonic()
        await anyio.sleep(world.random.uniform(0.0, _LOAD_S / 4))
        struck.set()
    await _work_again(world, report)
    report.working_s = max(report.working_s, time.monotonic() - over)
    if fault.runs:
        await _told_all(world)
    await _owned_again(world, report)
    try:
        await _known_still(world, report)
    except blows.HUNG_UP as exc:
        report.tally.fault("daemons that hung up", f"{exc!r} after: {what}")


def _all(world: World) -> list[Worker]:
    return [worker for some in world.workers.values() for worker in some]


async def _work_until(worker: Worker | Starter, end: anyio.Event) -> None:
    while not end.is_set():
        await worker.step()


async def _work_again(world: World, report: Report) -> None:
    """Every client looks at all its files: the next call must work, or the one after an error."""
    async with anyio.create_task_group() as tasks:
        for chat, some in world.workers.items():
            for worker in some:
                tasks.start_soon(_look, chat, worker, report)


async def _told_all(world: World) -> None:
    """Every process has ended, and every end was told."""
    async with anyio.create_task_group() as tasks:
        for chat in {chat.name: chat for chat in world.chats}.values():
            tasks.start_soon(settle, chat, world.runs[chat.name])


async def _look(chat: Chat, worker: Worker, report: Report) -> None:
    for number in range(1, _TRIES + 1):
        if await worker.look():
            report.tries[number] += 1
            return
    report.tally.fault("chats that did not work again", f"{chat.name}: {_TRIES} calls failed")


async def _owned_again(world: World, report: Report) -> None:
    """No chat has two sandboxes, and nothing else runs, once orphans have had their time."""
    started = time.monotonic()
    while unowned := await to_thread.run_sync(_unowned, world):
        if time.monotonic() - started > ORPHANED_S + _GRACE_S:
            report.tally.fault("sandboxes that nobody owns", ", ".join(unowned))
            return
        await anyio.sleep(0.1)
    report.unowned_s = max(report.unowned_s, time.monotonic() - started)


async def _known_still(world: World, report: Report) -> None:
    """The daemon lists every chat, and would not remove the files of any."""
    listed = await control(world.place, "list")
    found = {row["chat"] for row in listed.get("result", {}).get("chats", ())}
    if missing := {chat.name for chat in world.chats} - found:
        report.tally.fault("unknown chats", f"{missing} are not in {listed}")
    due = await control(world.place, "collect", dry_run=True)
    if items := [item for item in due["result"]["items"] if item["kind"] == "workspace"]:
        report.tally.fault("files that are due", str(items))


def _unowned(world: World) -> list[str]:
    """The chats that have more than one sandbox, and daemons beside the one."""
    found = Counter(world.machine.live())
    twice = [f"{count} of {chat or 'nobody'}" for chat, count in found.items() if count > 1]
    daemons = len(world.daemons())
    return twice + ([f"{daemons} daemons"] if daemons > 1 else [])


async def _reckon(world: World, report: Report) -> None:
    """What runs after the daemon has ended and orphans have had their time, and after a sweep."""
    deadline = time.monotonic() + ORPHANED_S + _GONE_S
    while True:
        left = await to_thread.run_sync(world.machine.remains)
        report.left = {kind: left[kind] for kind in ("processes", "containers")}
        if not any(report.left.values()) or time.monotonic() > deadline:
            break
        await anyio.sleep(0.2)
    if report.left["processes"]:
        for told in await to_thread.run_sync(lambda: [*world.machine.processes()]):
            report.tally.fault("left behind", told)
    flags = {"data_dir": str(world.place.data), "backend": world.place.backend}
    config = (await to_thread.run_sync(load_config, None, flags)).config
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        await backend.running()
    swept = await to_thread.run_sync(world.machine.remains)
    report.left = {kind: count + report.left.get(kind, 0) for kind, count in swept.items()}
    if any(swept.values()):
        report.tally.fault("left after a sweep", str(swept))
