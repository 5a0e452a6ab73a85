"""Memory: of an unused container, and of a server under much output."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import docker
from anyio.abc import ByteStream
from mcp import Client

from benchmarks.client import call, connect
from benchmarks.measure import Goal, Measured, Row
from benchmarks.places import (
    Failed,
    checked,
    configured,
    engine_client,
    in_thread,
    open_place,
    open_sandbox,
)
from mcp_sandbox.app.chats import open_manager, temporary_data
from mcp_sandbox.backends.sandbox_records import ProcessId, hold, identify
from mcp_sandbox.config import PoolConfig
from mcp_sandbox.models import ChatId, Network
from mcp_sandbox.runner.kernel.processes import find_descendants, map_parents
from mcp_sandbox.runtime.doors import Handler

_MIB = 1024 * 1024
_CONTAINERS = 8
# The runner gives its warm interpreter back after a minute without use.
_COOLING_S = 120.0
# Beside the runner itself one worker stays.
_PROCESSES_KEPT = 1
_WATCHED_S = 60.0
_LINE = "0123456789" * 10
_GIGABYTE = f"yes {_LINE} | head -c 1000000000"


async def _idle(_values: int) -> Measured:
    """Of several containers each, as a server with some chats holds them."""
    async with AsyncExitStack() as stack:
        api = stack.enter_context(engine_client()).api
        sandboxes = [
            await stack.enter_async_context(open_sandbox("docker")) for _ in range(_CONTAINERS)
        ]
        for each in sandboxes:
            checked(await each.runtime.run_code("print(1)", "python", timeout_s=30), "1\n")
        for each in sandboxes:
            await _until_cool(api, each.id)
        return Measured(
            tuple([await in_thread(partial(_taken_mb, api, each.id)) for each in sandboxes])
        )


async def _until_cool(api: docker.APIClient, name: str) -> None:
    """Return when the processes kept for the next code have ended, but the one that stays."""
    container: Any = await in_thread(lambda: api.inspect_container(name))
    inside = await in_thread(lambda: find_descendants([container["State"]["Pid"]], map_parents()))
    kept = [process for process in map(identify, inside) if process is not None]
    with anyio.move_on_after(_COOLING_S):
        async with anyio.create_task_group() as tasks:
            for process in kept:
                tasks.start_soon(_wait_for_end, process, kept, tasks.cancel_scope)
    if len(kept) > _PROCESSES_KEPT:
        raise Failed(f"{len(kept)} processes of the idle sandbox {name} do not end")


async def _wait_for_end(
    process: ProcessId, kept: list[ProcessId], enough: anyio.CancelScope
) -> None:
    if len(kept) > _PROCESSES_KEPT:
        descriptor = await in_thread(partial(hold, process))
        try:
            if descriptor is not None:
                await anyio.wait_readable(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        kept.remove(process)
    if len(kept) <= _PROCESSES_KEPT:
        enough.cancel()


def _taken_mb(api: docker.APIClient, name: str) -> float:
    """What `docker stats` counts, which leaves out droppable page cache, and the shim. Blocks."""
    memory: Any = api.stats(name, stream=False)["memory_stats"]
    details = memory["stats"]
    droppable = details.get("total_inactive_file", details.get("inactive_file", 0))
    return float(memory["usage"] - droppable) / _MIB + _shim_mb(api, name)


def _shim_mb(api: docker.APIClient, name: str) -> float:
    """The memory of a container's shim; of shared pages its share."""
    container: Any = api.inspect_container(name)
    for path in Path("/proc").iterdir():
        command = _command(path) if path.name.isdigit() else ""
        if "containerd-shim" in command and container["Id"] in command:
            lines = (path / "smaps_rollup").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    raise Failed(f"the shim of {name} is not among the processes that can be seen here")


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # It has ended since the directory was listed.
        return ""


@asynccontextmanager
async def _idle_chats(
    network: Network, count: int, handler: Handler | None = None
) -> AsyncGenerator[list[str]]:
    """The containers of chats that have done something, and do nothing now.

    With a `handler` each has a door to it.
    """
    async with AsyncExitStack() as stack:
        folder = await stack.enter_async_context(temporary_data())
        api = stack.enter_context(engine_client()).api
        config = await configured(folder, "docker")
        config = config.model_copy(update={"network": network, "pool": PoolConfig(size=0)})
        manager = await stack.enter_async_context(open_manager(config))
        for number in range(count):
            session = await manager.session(ChatId("benchmark", f"idle-{number}"))
            checked(await session.run_code("print(1)"), "1\n")
            if handler:
                await stack.enter_async_context(session.door(handler))
        names = [row.sandbox_id or "" for row in await manager.list()]
        for name in names:
            await _until_cool(api, name)
        yield names


async def _more_by_a_listener(values: int) -> Measured:
    """What one container takes more than another, in which nothing listens for the host."""

    async def greet(_stream: ByteStream) -> None:
        return

    async with _idle_chats("none", values, greet) as ours, _idle_chats("none", values) as theirs:
        return await _more((ours, theirs))


@asynccontextmanager
async def _both_networks(count: int) -> AsyncGenerator[tuple[list[str], list[str]]]:
    """As many that have allowed hosts, and that have no network."""
    async with _idle_chats("allowlist", count) as ours, _idle_chats("none", count) as theirs:
        yield ours, theirs


async def _more_by_doors(values: int) -> Measured:
    """What one container takes more than another, whose chat has no network."""
    async with _both_networks(values) as both:
        return await _more(both)


async def _more(both: Iterable[list[str]]) -> Measured:
    """What each container of the first takes more than one of the second."""
    with engine_client() as client:
        taken = [
            [await in_thread(partial(_taken_mb, client.api, name)) for name in names]
            for names in both
        ]
    return Measured(tuple(a - b for a, b in zip(*map(sorted, taken), strict=True)))


async def _wakes_by_doors(values: int) -> Measured:
    """How often more often pid 1 of the one wakes than that of the other."""
    with engine_client() as client:
        async with _both_networks(values) as both:
            pids = [
                [await in_thread(partial(_pid, client.api, each)) for each in names]
                for names in both
            ]
            before = [[_wakes(pid) for pid in each] for each in pids]
            await anyio.sleep(_WATCHED_S)
            after = [[_wakes(pid) for pid in each] for each in pids]
    woken = [
        [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
    ]
    return Measured(tuple(float(a - b) for a, b in zip(*map(sorted, woken), strict=True)))


def _pid(api: docker.APIClient, name: str) -> int:
    container: Any = api.inspect_container(name)
    return int(container["State"]["Pid"])


def _wakes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


async def _growth(values: int, prepare: str, work: Callable[[Client], Awaitable[None]]) -> Measured:
    """How much larger a server gets at most, in MiB; each value is of a new one."""
    return Measured(tuple([await _growth_once(prepare, work) for _ in range(values)]))


async def _growth_once(prepare: str, work: Callable[[Client], Awaitable[None]]) -> float:
    async with open_place("docker") as place, connect(place.config) as client:
        # What is loaded once, at the first call of a kind, is no growth.
        await call(client, "exec", command=f"{prepare}; seq 100000")
        await call(client, "write_file", path="small.txt", content="small")
        await call(client, "read_file", path="small.txt")
        server = _server_on(place.config.data_dir)
        before = _peak_from_now_mb(server)
        await work(client)
        return _status_mb(server, "VmHWM") - before


def _server_on(data_dir: Path) -> int:
    for pid in find_descendants([os.getpid()], map_parents()):
        command = _command(Path(f"/proc/{pid}"))
        if "mcp_sandbox stdio" in command and str(data_dir) in command:
            return pid
    raise Failed("the server that was started is not among our processes")


def _peak_from_now_mb(process: int) -> float:
    """Begin to count the peak anew; returns the present size."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return _status_mb(process, "VmRSS")


def _status_mb(process: int, field: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


async def _print(client: Client) -> None:
    """With live output on its way too, which a client without a progress token does not get."""
    result = await client.call_tool("exec", {"command": _GIGABYTE}, progress_callback=_ignore)
    said = (result.meta or {}).get("mcp-sandbox/result", {})
    if said.get("stdout_bytes") != 1_000_000_000:
        raise Failed(f"the command printed another amount: {said}")


async def _ignore(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001
    return


async def _read(client: Client) -> None:
    for first in (1, 5_000_000, 9_900_000):
        await call(client, "read_file", path="large.txt", offset=first)


ROWS = (
    Row(
        "memory-idle",
        f"each of {_CONTAINERS} idle containers, runner and shim",
        "-",
        Goal(12, "MiB"),
        _idle,
    ),
    Row(
        "memory-doors",
        "an idle container with network: allowlist, more than one with none",
        "-",
        Goal(0.6, "MiB"),
        _more_by_doors,
        pairs=4,
    ),
    Row(
        "memory-listener",
        "an idle container with a door that is open, more than one without",
        "-",
        Goal(1, "MiB"),
        _more_by_a_listener,
        pairs=4,
    ),
    Row(
        "wakes-doors",
        f"how often its pid 1 wakes in {_WATCHED_S:g} s, more than that of one with none",
        "-",
        Goal(0, "times"),
        _wakes_by_doors,
        pairs=4,
    ),
    Row(
        "memory-output",
        "growth of the server while a command prints 1 GB",
        "-",
        Goal(32, "MiB"),
        partial(_growth, prepare="true", work=_print),
        pairs=3,
    ),
    Row(
        "memory-read",
        "growth of the server while parts of a 1 GB file are read",
        "-",
        Goal(32, "MiB"),
        partial(_growth, prepare=f"{_GIGABYTE} > large.txt", work=_read),
        pairs=3,
    ),
)
