"""A sandbox tells how it is doing: paused, running, or what it died of."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import Limits, SandboxSpec
from mcp_sandbox.runtime.runtime import Runtime
from tests.backends.live import connected, made, spec_for

# What lies in /tmp outlives the commands that the kernel ends for it, and then it is pid 1's turn.
_FILL = "dd if=/dev/zero of=/tmp/{} bs=4k"


async def use_up_memory(runtime: Runtime) -> None:
    for number in range(50):
        await runtime.exec(_FILL.format(number))
        await runtime.files.write("file", bytes(8 << 20), append=False)


@pytest.fixture
async def backend(config: Config) -> AsyncGenerator[Backend]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as opened:
        yield opened


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    return spec_for(tmp_path)


async def test_a_paused_sandbox_goes_on_where_it_was(backend: Backend, spec: SandboxSpec) -> None:
    if backend.keeps_paused_files:
        pytest.skip("its pause keeps files alone")
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("echo before > /tmp/file")
            paused = await sandbox.pause()
            (info,) = await backend.running()
            assert info.state == ("paused" if paused else "running")
            await backend.attach(sandbox.id)
            await backend.attach(sandbox.id)
            assert (await runtime.exec("cat /tmp/file")).stdout == "before\n"


async def test_who_attaches_to_a_paused_sandbox_can_use_it(
    backend: Backend, spec: SandboxSpec
) -> None:
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox:
            await sandbox.pause()
            found = await backend.attach(sandbox.id)
            async with connected(found) as runtime:
                assert (await runtime.exec("echo fine")).stdout == "fine\n"


async def test_a_paused_sandbox_can_be_destroyed(backend: Backend, spec: SandboxSpec) -> None:
    async with made(backend, spec) as sandbox:
        await sandbox.pause()
        await backend.destroy(sandbox.id)
        assert await backend.running() == []


async def test_one_that_was_killed_says_so(backend: Backend, spec: SandboxSpec) -> None:
    async with made(backend, spec) as sandbox:
        assert await sandbox.ending() is None
        await backend.destroy(sandbox.id)
        assert await sandbox.ending() in ("killed", "lost")
        with pytest.raises(SandboxGone):
            await backend.attach(sandbox.id)


async def test_one_that_ran_out_of_memory_says_so(
    backend: Backend, spec: SandboxSpec, backend_name: str
) -> None:
    small = replace(spec, limits=Limits(memory_mb=64))
    with anyio.fail_after(50):
        async with made(backend, small) as sandbox, connected(sandbox) as runtime:
            with pytest.raises(SandboxGone):
                await use_up_memory(runtime)
            # Under gVisor an engine may never tell: its shim looks when the group is gone.
            untold = ["killed"] * (backend_name == "docker-runsc")
            assert await sandbox.ending(within_s=10) in ["memory", *untold]
