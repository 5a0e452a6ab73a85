"""From nothing to the first result: a new chat's first call against the bare means below it."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from shutil import copytree
from subprocess import DEVNULL, PIPE
from typing import Any, cast

import anyio
import docker
from docker.errors import NotFound

from benchmarks.measure import Goal, Measured, Row, Side, rested, times_slower
from benchmarks.places import Failed, checked, configured, engine_client, in_thread, open_place
from mcp_sandbox.app.chats import open_manager, temporary_data
from mcp_sandbox.backends.bubblewrap.arguments import Descriptors, arguments, make_etc
from mcp_sandbox.backends.bubblewrap.host import Host
from mcp_sandbox.backends.docker.engine import security_options
from mcp_sandbox.backends.docker.spec import PYTHON, Placement, container_body, instance_of
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import Config, PoolConfig
from mcp_sandbox.models import BackendName, ChatId, Mount, Network, SandboxId, SandboxSpec
from mcp_sandbox.sessions.manager import SessionManager

_CODE = "print(1)"
_PRINTED = b"1\n"
_REST_S = 0.1


@asynccontextmanager
async def _new_chats(
    name: BackendName, *, warm: int = 0, network: Network = "none"
) -> AsyncGenerator[Side]:
    """Each turn is a chat that never was: its directories, its sandbox, its first result.

    With `warm` sandboxes that wait for it, a turn ends when as many wait for the next.
    """
    numbers = count()
    async with temporary_data() as folder:
        config = await configured(folder, name)
        changes = {"pool": PoolConfig(size=warm), "network": network}
        pooled = config.model_copy(update=changes)
        async with open_manager(pooled) as manager:
            await _filled(manager)

            async def side() -> float:
                session = await manager.session(ChatId("benchmark", f"new-{next(numbers)}"))
                started = time.perf_counter()
                checked(await session.run_code(_CODE), _PRINTED.decode())
                taken = time.perf_counter() - started
                await session.reset()
                await _filled(manager)
                return taken

            yield side


async def _filled(manager: SessionManager) -> None:
    """Return when as many sandboxes wait as should."""
    while True:
        pool = manager.statistics().pool
        if not pool or pool["idle"] == pool["max"]:
            return
        await anyio.sleep(0.01)


async def _warm_docker_start(pairs: int) -> Measured:
    async with _new_chats("docker", warm=1) as ours, _new_chats("docker") as theirs:
        return await times_slower(rested(ours, _REST_S), rested(theirs, _REST_S), pairs)


async def _start_with_doors(pairs: int) -> Measured:
    async with _new_chats("docker", network="allowlist") as ours, _new_chats("docker") as theirs:
        return await times_slower(rested(ours, _REST_S), rested(theirs, _REST_S), pairs)


async def _docker_start(pairs: int) -> Measured:
    async with open_place("docker") as place, _new_chats("docker") as ours:
        sockets = place.config.data_dir / "sockets"
        sockets.mkdir()
        os.chown(sockets, *sandbox_user())
        (sockets / "hosts").touch()
        spec = await place.spec()
        with engine_client() as client:
            body = _bare_body(client, place.config, spec, sockets)
            theirs = partial(in_thread, partial(_raw_container, client.api, body))
            return await times_slower(rested(ours, _REST_S), rested(theirs, _REST_S), pairs)


def _bare_body(
    client: docker.DockerClient, config: Config, spec: SandboxSpec, sockets: Path
) -> dict[str, Any]:
    """A sandbox's container that prints instead of serving."""
    place = Placement(
        name=SandboxId("unnamed"),
        image=client.images.get(config.docker.image).id or "",
        instance=instance_of(config.data_dir),
        token="0" * 64,
        user=":".join(map(str, sandbox_user())),
        shown=sockets,
        apparmor="apparmor" in security_options(client.info()),
    )
    return container_body(spec, place) | {
        "Entrypoint": [PYTHON],
        "Cmd": ["-c", _CODE],
        "AttachStdout": True,
    }


def _raw_container(api: docker.APIClient, body: dict[str, Any]) -> float:
    """Create, attach, start, read the first output; then remove. Blocks."""
    started = time.perf_counter()
    name = cast("Any", api).create_container_from_config(body, None)["Id"]
    try:
        with closing(cast("Generator[bytes]", api.attach(name, stream=True))) as printed:
            api.start(name)
            said = next(printed, b"")
            taken = time.perf_counter() - started
        # Unbuffered, its Python may send the end of the line by itself.
        if said not in (_PRINTED, _PRINTED.strip()):
            raise Failed(f"the bare container printed {said!r}")
        return taken
    finally:
        _remove(api, name)


def _remove(api: docker.APIClient, name: str) -> None:
    """Return when it is gone: it removes itself, and the next turn should not feel that."""
    try:
        api.wait(name, condition="removed")
    except NotFound:
        return


async def _bubblewrap_start(pairs: int) -> Measured:
    async with temporary_data() as folder, _new_chats("bubblewrap") as ours:
        bare = await in_thread(partial(_BareBubblewrap, folder))
        return await times_slower(rested(ours, _REST_S), rested(bare.side, _REST_S), pairs)


class _BareBubblewrap:
    """bwrap with a sandbox's arguments and nothing around it. Making one blocks."""

    def __init__(self, folder: Path) -> None:
        self._host = host = Host(folder)
        self._etc = make_etc(*sandbox_user(), "none")
        targets = {"mount-0": "/workspace", "mount-1": "/home/sandbox"}
        self._reach = {name: str(folder / name) for name in (*targets, "runner")}
        copytree(host.runner, self._reach["runner"])
        for path in self._reach.values():
            Path(path).mkdir(exist_ok=True)
        mounts = (Mount(Path(self._reach[name]), target) for name, target in targets.items())
        inside = host.inside(SandboxSpec(tuple(mounts)), SandboxId("unnamed"))
        self._inside = replace(inside, memory_group=None, environment={})

    async def side(self) -> float:
        """Start it and read the first output; then wait for its end."""
        with ExitStack() as opened:
            command, files = self._prepare(opened)
            started = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, pass_fds=files, env={}
            )
            said = await cast("asyncio.StreamReader", process.stdout).readline()
            taken = time.perf_counter() - started
            _, complaint = await process.communicate()
        if said != _PRINTED:
            raise Failed(f"bare bwrap printed {said!r} and said {complaint!r}")
        return taken

    def _prepare(self, opened: ExitStack) -> tuple[list[str], tuple[int, ...]]:
        host = self._host
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, null)
        files = {path: _file(opened, data) for path, data in self._etc.files.items()}
        filter_ = _file(opened, host.filter)
        numbers = Descriptors(filter_, status=null, block=null, starter=null, etc=files)
        words = arguments(self._inside, host.system, self._etc.bound, numbers, self._reach)
        program = str(host.program.root / host.program.inner)
        command = [program, *words, "--", str(host.python), "-c", _CODE]
        return command, (null, filter_, *files.values())


def _file(opened: ExitStack, data: bytes) -> int:
    number = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    opened.callback(os.close, number)
    os.write(number, data)
    os.lseek(number, 0, os.SEEK_SET)
    return number


ROWS = (
    Row(
        "start-docker",
        "new chat to the result of run_code print(1), docker",
        "docker-py: create, start, first print of such a container",
        Goal(1.2),
        _docker_start,
    ),
    Row(
        "start-warm",
        "new chat to the result of run_code print(1), docker, a warm sandbox waiting",
        "the same without a warm sandbox",
        Goal(0.05),
        _warm_docker_start,
    ),
    Row(
        "start-doors",
        "new chat to the result of run_code print(1), docker, network: allowlist",
        "the same with network: none",
        Goal(1.05),
        _start_with_doors,
    ),
    Row(
        "start-bubblewrap",
        "new chat to the result of run_code print(1), bubblewrap",
        "bare bwrap with the same arguments: first print",
        Goal(1.6),
        _bubblewrap_start,
    ),
)
