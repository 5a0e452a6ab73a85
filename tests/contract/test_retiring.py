"""A sandbox ends when its last user lets it, and never under anybody who still needs it."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.runtime.runtime import Runtime
from tests.backends.live import connected, made, spec_for


@pytest.fixture
async def backend(config: Config) -> AsyncGenerator[Backend]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as opened:
        yield opened


@pytest.fixture
async def sandbox(backend: Backend, tmp_path: Path) -> AsyncGenerator[Sandbox]:
    async with made(backend, spec_for(tmp_path)) as running:
        yield running


async def gone(backend: Backend, sandbox: Sandbox) -> None:
    """Wait until nothing runs in it, and none is listed unless it holds its files."""
    assert await sandbox.ending(within_s=20)
    with anyio.fail_after(30):
        while not backend.holds_files and await backend.running():
            await anyio.sleep(0.02)


async def background(runtime: Runtime, count: int) -> None:
    """Wait until the runner has said that so many run in the background."""
    with anyio.fail_after(30):
        while runtime.background.total != count:
            await anyio.sleep(0.01)


async def commands(runtime: Runtime) -> set[str]:
    return {one.command for one in (await runtime.status()).background.processes}


async def test_the_only_user_may_end_it_and_nothing_is_left(
    backend: Backend, sandbox: Sandbox, backend_name: str
) -> None:
    async with connected(sandbox) as runtime:
        await runtime.exec("echo here > file")
        assert await runtime.retire(background_too=False) == ""
        with pytest.raises(SandboxGone):
            await runtime.exec("true")
    await gone(backend, sandbox)
    # Files in a pod go with it.
    if backend.holds_files and backend_name != "kubernetes-backups":
        async with connected(await backend.attach(sandbox.id)) as again:
            assert (await again.exec("cat file")).stdout == "here\n"
    else:
        with pytest.raises(SandboxGone):
            await backend.attach(sandbox.id)


async def test_it_does_not_end_under_another_server(sandbox: Sandbox) -> None:
    async with connected(sandbox) as mine:
        async with connected(sandbox) as theirs:
            assert await mine.retire(background_too=True) == "users"
            assert (await theirs.exec("echo fine")).stdout == "fine\n"
            assert (await theirs.status()).connections == 2
        with anyio.fail_after(10):
            while (await mine.status()).connections > 1:
                await anyio.sleep(0.01)
        assert await mine.retire(background_too=True) == ""


async def test_two_that_leave_at_once_leave_nobody_behind(
    backend: Backend, sandbox: Sandbox
) -> None:
    async with connected(sandbox) as mine, connected(sandbox) as theirs:
        assert await mine.retire(background_too=True, leaving=True) == "users"
        assert await theirs.retire(background_too=True, leaving=True) == ""
    await gone(backend, sandbox)


async def test_it_does_not_end_under_a_call(sandbox: Sandbox) -> None:
    async with connected(sandbox) as runtime, anyio.create_task_group() as tasks:
        started = anyio.Event()
        ended: list[str] = []

        async def note(_name: str, _data: bytes) -> None:
            started.set()

        async def work() -> None:
            command = "echo started; while [ ! -e stop ]; do sleep 0.05; done; echo ended"
            ended.append((await runtime.exec(command, on_output=note)).stdout)

        tasks.start_soon(work)
        with anyio.fail_after(30):
            await started.wait()
            assert await runtime.retire(background_too=True) == "calls"
            status = await runtime.status()
            assert (status.calls, status.idle_s) == (1, 0.0)
            await runtime.files.write("stop", b"", append=False)
    assert ended == ["started\nended\n"]


async def test_what_runs_in_the_background_keeps_it(
    backend: Backend, sandbox: Sandbox, backend_name: str
) -> None:
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(connected(sandbox))
        await runtime.exec("sleep 86396 & (setsid sleep 86395 &)")
        with anyio.fail_after(30):
            while await commands(runtime) != {"sleep 86396", "sleep 86395"}:
                await anyio.sleep(0.01)
        assert await runtime.retire(background_too=False) == "background"
        assert (await runtime.exec("ps -eo args | grep -c '[s]leep 8639'")).stdout == "2\n"
        assert await runtime.retire(background_too=True) == ""
    await gone(backend, sandbox)


async def test_every_server_is_told_what_runs_in_the_background(
    sandbox: Sandbox, backend_name: str
) -> None:
    async with connected(sandbox) as mine, connected(sandbox) as theirs:
        await mine.exec("sleep 86394 & sleep 0.2")
        await background(mine, 1)
        (one,) = mine.background.processes
        assert one.command == "sleep 86394"
        await background(theirs, 1)
        async with connected(sandbox) as late:
            await background(late, 1)
        await mine.exec(f"kill {one.pid}")
        await background(mine, 0)
        await background(theirs, 0)
        assert (await mine.exec("true & sleep 0.2")).success
        await background(mine, 0)
