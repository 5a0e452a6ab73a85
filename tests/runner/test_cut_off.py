"""Calls that are cut off in a bad moment: nothing ends with them but what they have started."""

import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.channel import Channel
from tests.runner.test_protocol import Runner, greeted, started


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncGenerator[Runner]:
    async with started(tmp_path, idle_s="900") as running:
        yield running


async def send(runner: Runner, *frames: tuple[dict[str, Any], bytes]) -> None:
    """Send all of these at once, and hang up before any of them is read."""
    stream, _, seal = await greeted(runner)
    runner.process.send_signal(signal.SIGSTOP)
    await stream.send(b"".join(protocol.encode(header, body, seal) for header, body in frames))
    await stream.aclose()
    runner.process.send_signal(signal.SIGCONT)


async def cell(channel: Channel, code: str, *, leave: anyio.CancelScope | None = None) -> Any:
    args = {"language": "python", "notebook": "a", "code_bytes": len(code)}
    return await channel.call("run", args, body=code.encode(), leave=leave)


def is_over() -> anyio.CancelScope:
    return anyio.CancelScope(deadline=-1)


async def test_who_hangs_up_as_it_is_answered_leaves_the_others_alone(runner: Runner) -> None:
    async with runner.channel() as channel:
        begun = await channel.call("run", {"argv": ["sleep", "86310"]}, leave=is_over())
        process = begun.result["process"]
        look = {"t": "call", "id": 1, "op": "wait", "args": {"process": process}, "release": True}
        await send(runner, (look, b""))
        (row,) = (await channel.call("processes", {})).result["processes"]
        assert (row["id"], row["running"]) == (process, True)
        stop = {"process": process, "signal": signal.SIGKILL, "grace_s": 0}
        assert (await channel.call("stop", stop)).result["process"] == process


async def test_code_that_is_cut_off_as_it_begins_takes_no_notebook_with_it(runner: Runner) -> None:
    async with runner.channel() as channel:
        await cell(channel, "x = 1")
        begun = await cell(channel, "import time; time.sleep(0.3); x", leave=is_over())
        # The worker of this one has yet to say which process it is.
        run = {"language": "python", "code_bytes": 4}
        frames = [({"t": "call", "id": 1, "op": "run", "args": run}, b"pass")]
        await send(runner, *frames, ({"t": "cancel", "id": 1}, b""))
        ended = await channel.call("wait", {"process": begun.result["process"]})
        assert (ended.body, ended.result["signal"]) == (b"1\n", None)
