"""Notebooks against ipykernel, driven by jupyter_client, on the host."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import Failed, checked
from benchmarks.places import open_sandbox as sandbox_in
from mcp_sandbox.runtime.runtime import Runtime

_PRINT = "print(1)"
# What is its own, and its share of what it has in common with others, in kB.
_MEMORY = (
    "with open('/proc/self/smaps_rollup') as file:\n"
    "    print(next(line.split()[1] for line in file if line.startswith('Pss:')))"
)

Cell = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def _kernel() -> AsyncGenerator[Cell]:
    """A new ipykernel that is ready."""
    try:
        manager: Any = import_module("jupyter_client").AsyncKernelManager()
        import_module("ipykernel")
    except ImportError as exc:
        raise Failed("pip install ipykernel jupyter_client, to measure against them") from exc
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        yield partial(_told, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def _told(client: Any, code: str) -> str:
    said = list[str]()

    def hear(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            said.append(message["content"]["text"])

    await client.execute_interactive(code, output_hook=hear, timeout=60)
    return "".join(said)


async def _cell(runtime: Runtime, name: str) -> None:
    checked(await runtime.run_code(_PRINT, "python", notebook=name, timeout_s=30), "1\n")


async def _cells(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox, _kernel() as kernel:

        async def theirs() -> None:
            if await kernel(_PRINT) != "1\n":
                raise Failed("ipykernel has printed something else")

        ours = partial(_cell, sandbox.runtime, "a")
        await ours()
        return await times_slower(clocked(ours), clocked(theirs), pairs)


async def _first_cells(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        numbers = count()

        async def ours() -> None:
            # At most eight: each ends with its cell, and the next one is new.
            code, name = (
                f"{_PRINT}\nimport os, sys\nsys.stdout.flush(); os._exit(0)",
                str(next(numbers)),
            )
            checked(
                await sandbox.runtime.run_code(code, "python", notebook=name, timeout_s=30), "1\n"
            )

        async def theirs() -> None:
            async with _kernel():
                pass

        return await times_slower(clocked(ours), clocked(theirs), pairs)


async def _memory(values: int) -> Measured:
    async with sandbox_in("docker") as sandbox, _kernel() as kernel:

        async def ratio() -> float:
            result = await sandbox.runtime.run_code(_MEMORY, "python", notebook="a", timeout_s=30)
            return float(result.stdout) / float(await kernel(_MEMORY))

        return Measured(tuple([await ratio() for _ in range(values)]))


ROWS = (
    Row("cell", "print(1) in a notebook", "in an ipykernel", Goal(0.25), _cells),
    Row(
        "cell-first", "a new notebook's cell", "a new ipykernel is ready", Goal(0.05), _first_cells
    ),
    Row("cell-memory", "memory of a notebook", "of an ipykernel", Goal(0.25), _memory, pairs=5),
)
