"""What goes on without its call: to start it, to look at it, and to work beside it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from anyio import CancelScope, current_time

from benchmarks.measure import Action, Goal, Measured, Row, clocked, times_slower
from benchmarks.places import Failed, checked
from benchmarks.places import open_sandbox as sandbox_in
from mcp_sandbox.runtime.runtime import Runtime

_BESIDE = 3
_WAIT_S = 45.0
_COMMAND = "true"


def _leave(wait_s: float = 0) -> CancelScope:
    return CancelScope(deadline=current_time() + wait_s)


async def _exec(runtime: Runtime) -> None:
    checked(await runtime.exec(_COMMAND), "")


async def _exec_waiting(runtime: Runtime) -> None:
    checked(await runtime.exec(_COMMAND, leave=_leave(_WAIT_S)), "")


async def _start(runtime: Runtime) -> None:
    await runtime.exec("exec sleep 0.05", leave=_leave())


@asynccontextmanager
async def _running(runtime: Runtime, count: int) -> AsyncGenerator[list[str]]:
    begun = [await runtime.exec("exec sleep 3600", leave=_leave()) for _ in range(count)]
    names = [each.process or "" for each in begun]
    if not all(names):
        raise Failed(f"nothing goes on: {begun}")
    yield names
    for name in names:
        await runtime.processes.stop(name, "KILL")


async def _pairs(
    pairs: int, ours: Callable[[Runtime], Awaitable[None]], theirs: Callable[[Runtime], Action]
) -> Measured:
    async with sandbox_in("docker") as sandbox:
        mine, other = partial(ours, sandbox.runtime), theirs(sandbox.runtime)
        return await times_slower(clocked(mine), clocked(other), pairs)


async def _started(pairs: int) -> Measured:
    return await _pairs(pairs, _start, lambda runtime: partial(_exec, runtime))


async def _waited(pairs: int) -> Measured:
    return await _pairs(pairs, _exec_waiting, lambda runtime: partial(_exec, runtime))


async def _looked(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        runtime = sandbox.runtime
        async with _running(runtime, 1) as (name,):

            async def look() -> None:
                await runtime.processes.wait(name, leave=_leave())

            async def ping() -> None:
                await runtime._channel.call("ping", {})  # noqa: SLF001 - nothing is faster

            return await times_slower(clocked(look), clocked(ping), pairs)


async def _beside(pairs: int) -> Measured:
    async with (
        sandbox_in("docker") as busy,
        sandbox_in("docker") as quiet,
        _running(busy.runtime, _BESIDE),
    ):
        ours, theirs = partial(_exec, busy.runtime), partial(_exec, quiet.runtime)
        return await times_slower(clocked(ours), clocked(theirs), pairs)


ROWS = (
    Row("start-process", "exec with wait_s=0", "exec true", Goal(1.0), _started, pairs=200),
    Row("look", "process action=wait wait_s=0", "a ping", Goal(2.0), _looked, pairs=200),
    Row("wait", "exec true with wait_s", "exec true without", Goal(1.05), _waited, pairs=300),
    Row(
        "beside",
        f"exec true beside {_BESIDE} processes",
        "exec true in another sandbox",
        Goal(1.15),
        _beside,
        pairs=300,
    ),
)
