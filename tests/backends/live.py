"""A sandbox of a backend with its runtime, for tests that look at it from inside and outside."""

import json
import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.config import Config
from mcp_sandbox.models import Mount, SandboxInfo, SandboxSpec
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime


def spec_for(folder: Path, further: Iterable[Mount] = ()) -> SandboxSpec:
    """A spec with directories of its own below `folder`."""
    mounts = (
        Mount(folder / "workspace", "/workspace"),
        Mount(folder / "home", "/home/sandbox"),
        *further,
    )
    for mount in mounts:
        mount.source.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(mount.source, 10001, 10001)
    return replace(SandboxSpec(mounts), idle_s=60)


@asynccontextmanager
async def connected(sandbox: Sandbox) -> AsyncGenerator[Runtime]:
    async with anyio.create_task_group() as tasks:
        channel = Channel(await sandbox.open_channel(), sandbox.token)
        await channel.open(tasks)
        runtime = Runtime(channel, keep_bytes=1 << 20)
        try:
            yield runtime
        finally:
            await runtime.aclose()


@asynccontextmanager
async def made(backend: Backend, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
    if backend.holds_files:
        spec = replace(spec, mounts=())
    sandbox = await backend.create(spec)
    try:
        yield sandbox
    finally:
        with anyio.CancelScope(shield=True):
            await backend.destroy(sandbox.id)


async def say(backend: Backend, spec: SandboxSpec, command: str) -> str:
    """What a command prints in a new sandbox."""
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            result = await runtime.exec(command, timeout_s=40)
            assert not result.timed_out
            return result.stdout + result.stderr


async def chats_running(config: Config) -> list[SandboxInfo]:
    """The sandboxes of chats; a daemon may have others waiting."""
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        found = [info for info in await backend.running() if "chat" in info.labels]
        # Where a paused one keeps its files, it costs nothing but these.
        rests = "paused" if backend.keeps_paused_files else ""
        return [info for info in found if info.state != rests]


def left(data_root: Path, sandbox_id: str = "mcs-") -> list[str]:
    """Run directories and control groups that are still there."""
    runs = data_root / "sandbox" / "run"
    names = os.listdir(runs) if runs.exists() else []
    groups = [
        str(path)
        for base in Path("/sys/fs/cgroup").glob("*/mcp-sandbox")
        for path in base.iterdir()
        if path.is_dir() and path.name in (sandbox_id, *names)
    ]
    return [*names, *groups]


def state_of(data_root: Path, sandbox_id: str) -> Any:
    """What is remembered of a sandbox."""
    return json.loads((data_root / "sandbox/run" / sandbox_id / "state.json").read_text())


def proc(pid: int | str, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
