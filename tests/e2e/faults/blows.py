"""What happens to a world, each at a random moment. A blow returns when what it broke is whole."""

import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random

import anyio
from anyio import to_thread

from tests.daemon.running import control
from tests.e2e.faults.world import World

Blow = Callable[[World], Awaitable[str]]
"""Strikes once, and returns what it did exactly, for the counts."""

HUNG_UP = (OSError, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.EndOfStream)
"""What a client of a daemon meets that ends before it answers."""

_DECIDED_S = 60.0
# A moment without any notebook passes sooner.
_BEGUN_S = 10.0


async def kill_relay(world: World) -> str:
    chat = world.random.choice(world.chats)
    return "relay killed" if chat.kill_server() else "no relay was there"


async def lose_client(world: World) -> str:
    """What a relay sees of a client that is killed."""
    return "client gone" if world.random.choice(world.chats).drop() else "no client was there"


async def kill_worker(world: World) -> str:
    name = world.random.choice(world.chats).name
    with world.in_trouble(name):
        hit = await to_thread.run_sync(world.machine.kill_worker, name, world.random)
    return "worker killed" if hit else "no worker was there"


async def kill_notebook(world: World) -> str:
    """No call fails for it, and nothing but its cell ends."""
    with anyio.move_on_after(_BEGUN_S):
        while True:
            starter = world.random.choice(world.starters)
            runs, name = starter.runs, starter.notebook
            runs.struck_notebook = name
            when = "in a cell" if runs.has_cell(name) else "between cells"
            if await to_thread.run_sync(world.machine.kill_notebook, starter.chat.name, name):
                return f"notebook killed {when}"
            runs.struck_notebook = ""
            await anyio.sleep(0.02)
    return "no notebook was there"


async def kill_daemon(world: World) -> str:
    with world.everybody_in_trouble():
        killed = await world.kill_daemons()
    return "daemon killed" if killed else "no daemon was there"


async def kill_runner(world: World) -> str:
    return await _kill_sandbox(world, world.machine.kill_runner, "runner")


async def kill_sandbox(world: World) -> str:
    """The container; a sandbox of bubblewrap has nothing around its pid 1 that it ends with."""
    if world.machine.backend == "docker":
        return await _kill_sandbox(world, world.machine.kill_container, "container")
    return await _kill_sandbox(world, world.machine.kill_runner, "pid 1")


async def _kill_sandbox(world: World, kill: Callable[[str], bool], what: str) -> str:
    name = world.random.choice(world.chats).name
    with world.in_trouble(name):
        hit = await to_thread.run_sync(kill, name)
    return f"{what} killed" if hit else f"no {what} was there"


async def start_several(world: World) -> str:
    """Several daemons at once, beside a running one or in the place of a killed one."""
    if running := world.random.random() < 0.5:
        started = [world.start_daemon() for _ in range(world.random.choice((1, 2, 3)))]
        await _decided(world, started, left=0)
    else:
        with world.everybody_in_trouble():
            await world.kill_daemons()
            started = [world.start_daemon() for _ in range(world.random.choice((2, 3)))]
            await _decided(world, started, left=1)
    return "beside a running one" if running else "in the place of a killed one"


async def _decided(world: World, started: list[subprocess.Popen[bytes]], left: int) -> None:
    """Wait until all but so many of these have given up, and one daemon is there."""
    with anyio.move_on_after(_DECIDED_S):
        while sum(child.poll() is None for child in started) > left or len(world.daemons()) != 1:
            await anyio.sleep(0.02)
    alive = world.daemons()
    if len(alive) != 1:
        world.tally.fault("not one daemon", f"{len(alive)} after {_DECIDED_S:g} s")
    for child in started:
        code, said = child.poll(), world.log_of(child)
        if code is not None and (code != 1 or "already" not in said):
            world.tally.fault("wrong last words", f"a second daemon ended with {code}: {said!r}")


async def ruin_store(world: World) -> str:
    """Records are deleted, cut short or filled with garbage, under the daemon or without one."""
    how = world.random.choice(tuple(_RUINS))
    paths = await to_thread.run_sync(_some_of_store, world)
    if world.random.random() < 0.5:
        with world.everybody_in_trouble():
            await world.kill_daemons()
            await to_thread.run_sync(_ruin, world, how, paths)
        return f"{how} without a daemon"
    await to_thread.run_sync(_ruin, world, how, paths)
    return f"{how} under the daemon"


def _some_of_store(world: World) -> list[Path]:
    folder = world.place.data / "sandbox"
    here = [*folder.glob("records/*/*.json"), *folder.glob("clock")]
    return world.random.sample(here, world.random.randint(1, len(here))) if here else []


def _ruin(world: World, how: str, paths: list[Path]) -> None:
    for path in paths:
        # A daemon that ended just now may have taken its log away.
        with suppress(FileNotFoundError):
            _RUINS[how](path, world.random)


def _cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randint(0, path.stat().st_size))


def _scribble(path: Path, random: Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(random.choice((0, random.randint(0, size))))
        file.write(random.randbytes(random.choice((16, 4096, 100_000))))


_RUINS: Mapping[str, Callable[[Path, Random], object]] = {
    "deleted": lambda path, _random: path.unlink(),
    "truncated": _cut,
    "garbage": _scribble,
}


async def fill_disk(world: World) -> str:
    """The disk is full for a moment; sometimes the daemon dies meanwhile."""
    ballast = world.place.home / "ballast"
    with world.everybody_in_trouble():
        await to_thread.run_sync(_fill, ballast)
        await anyio.sleep(world.random.uniform(0.0, 0.8))
        if killed := world.random.random() < 0.3:
            await world.kill_daemons()
            await anyio.sleep(world.random.uniform(0.0, 1.0))
        await to_thread.run_sync(ballast.unlink)
    return "full while the daemon was killed" if killed else "full"


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


async def jump(world: World) -> str:
    """The wall clock jumps, days or years, and some time really passes.

    Meanwhile one chat may be getting a new sandbox, and files are collected.
    """
    name = world.random.choice(world.chats).name
    async with anyio.create_task_group() as tasks:
        if stopped := world.random.random() < 0.5:
            tasks.start_soon(_stop, world, name)
            await anyio.sleep(world.random.uniform(0.0, 0.5))
        by = await to_thread.run_sync(_set_clock, world)
        collected = (await control(world.place, "collect"))["result"]["items"]
        if gone := [item for item in collected if item["kind"] == "workspace"]:
            world.tally.fault("removed files", str(gone))
    way = "forwards" if by > 0 else "backwards"
    return f"{way} while a sandbox was made" if stopped else way


async def _stop(world: World, name: str) -> None:
    with world.in_trouble(name):
        await control(world.place, "stop", chat=name)


def _set_clock(world: World) -> float:
    clock = world.ground.clock
    assert clock is not None
    _, passed = map(float, clock.read_text().split())
    by = world.random.choice((1, 30, 400)) * 86_400.0 * world.random.choice((1, -1))
    passed += world.random.uniform(600.0, 1200.0)
    fresh = clock.with_suffix(".new")
    fresh.write_text(f"{by} {passed}")
    fresh.rename(clock)
    return by


async def restart_engine(world: World) -> str:
    engine = world.ground.engine
    assert engine is not None
    with world.everybody_in_trouble():
        return await to_thread.run_sync(engine.restart, world.random)
