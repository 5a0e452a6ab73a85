"""The places that rows measure in, each gone with its block: sandboxes, an engine's client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TypeVar

import anyio
import docker
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend, temporary_data
from mcp_sandbox.backends.base import Backend
from mcp_sandbox.backends.docker.engine import find_engine
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import Config, docker_variables, home, load_config
from mcp_sandbox.models import BackendName, ChatId, ExecResult, Mount, SandboxId, SandboxSpec
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.users import SandboxUsers

T = TypeVar("T")
CHAT = ChatId("benchmark", "one")
PYTHON = "/usr/bin/python3"
_KEEP_BYTES = 64 * 1024 * 1024
_RECENT_S = 75.0


async def outwait_deletions() -> None:
    """Wait until what earlier rows have deleted slows down the making of files no more.

    For a minute ext4 without a journal uses no inode of a deleted file, and looks at each of them
    whenever it makes one.
    """
    await anyio.sleep(_RECENT_S)


class Failed(Exception):
    """A side did not do what is measured, so its time would mean nothing."""


async def configured(data_dir: Path, backend: BackendName) -> Config:
    """The operator's configuration, with another data root and one backend."""
    config = (await to_thread.run_sync(load_config)).config
    return config.model_copy(update={"data_dir": data_dir, "backend": backend})


@dataclass(frozen=True)
class Place:
    """A data root of its own with a backend on it."""

    config: Config
    backend: Backend

    async def spec(self, chat: ChatId = CHAT) -> SandboxSpec:
        """What a session would ask for."""
        workspaces = Workspaces(self.config.data_dir, users=SandboxUsers(one=sandbox_user()))
        directories = await workspaces.open(chat)
        return SandboxSpec(
            mounts=(
                Mount(directories.workspace, "/workspace"),
                Mount(directories.home, "/home/sandbox"),
            )
        )


@asynccontextmanager
async def open_place(name: BackendName) -> AsyncGenerator[Place]:
    """Open a backend on an empty data root; its sandboxes and its files end with the block."""
    async with temporary_data() as folder:
        config = await configured(folder, name)
        async with open_backend(name, config) as backend:
            try:
                yield Place(config, backend)
            finally:
                with anyio.CancelScope(shield=True):
                    for info in await backend.running():
                        await backend.destroy(info.id)


@dataclass(frozen=True)
class Opened:
    """A running sandbox and the calls to it."""

    id: SandboxId
    runtime: Runtime


@asynccontextmanager
async def open_sandbox(name: BackendName) -> AsyncGenerator[Opened]:
    """Open a sandbox in a place of its own."""
    async with open_place(name) as place, open_in(place, CHAT) as sandbox:
        yield sandbox


@asynccontextmanager
async def open_in(place: Place, chat: ChatId) -> AsyncGenerator[Opened]:
    """Open the sandbox of one chat."""
    sandbox = await place.backend.create(await place.spec(chat))
    async with anyio.create_task_group() as tasks:
        channel = Channel(await sandbox.open_channel(), sandbox.token)
        await channel.open(tasks)
        yield Opened(sandbox.id, Runtime(channel, keep_bytes=_KEEP_BYTES))
        await channel.aclose()


@contextmanager
def engine_client() -> Iterator[docker.DockerClient]:
    """Docker's own library on the engine that we use, to measure ours against it."""
    client = docker.DockerClient(
        base_url=find_engine(None, docker_variables(), home()).url, version="auto"
    )
    try:
        yield client
    finally:
        client.close()


async def in_thread(work: Callable[[], T]) -> T:
    return await to_thread.run_sync(work)


def checked(result: ExecResult, stdout: str) -> None:
    """Refuse a result that is not the expected one."""
    if not result.success or result.stdout != stdout:
        raise Failed(f"the sandbox answered {result} instead of {stdout!r}")


async def on_host(command: Sequence[str], stdout: bytes) -> None:
    """Run a program on this machine with asyncio, and read its output as the runner does."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    out, _ = await process.communicate()
    if process.returncode != 0 or out != stdout:
        raise Failed(f"{list(command)} on the host ended with {process.returncode}: {out!r}")
