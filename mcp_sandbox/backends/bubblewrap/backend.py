"""The bubblewrap backend: a sandbox is a tree of unprivileged processes in its own namespaces."""

import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.backends.bubblewrap import cgroups, verify
from mcp_sandbox.backends.bubblewrap.facts import facts
from mcp_sandbox.backends.bubblewrap.host import Host
from mcp_sandbox.backends.bubblewrap.launch import NotStarted, Told, launch
from mcp_sandbox.backends.bubblewrap.remedies import explain, look
from mcp_sandbox.backends.process import end, identify, kill
from mcp_sandbox.backends.records import Record, Records
from mcp_sandbox.backends.resident import ProcessSandbox, Residents
from mcp_sandbox.backends.runner_environment import beside_pid_1, environment
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import (
    BackendName,
    Mount,
    SandboxId,
    SandboxInfo,
    SandboxSpec,
)

_HOME = "/home/sandbox"
_PATH = f"{_HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin"
_LAUNCHER_LIMIT_S = 2.0
_START_LIMIT_S = 30.0


class BubblewrapBackend:
    """Makes sandboxes with bwrap; no engine, no root, no image.

    A sandbox outlives the server that made it until it is idle, as a container would, and any
    server of the same data root can attach to it.
    """

    def __init__(self, data_root: Path) -> None:
        self._root = data_root
        self._records = Records(data_root, "bubblewrap")
        self._residents = Residents(self._records)
        self._host: Host | None = None

    @property
    def name(self) -> BackendName:
        return "bubblewrap"

    async def probe(self) -> str:
        """One line that says what works here, after a sandbox was really made and reached.

        Raises:
            BackendUnavailable: it cannot isolate here; the message names the failing step
                and the remedy.
        """
        host = await to_thread.run_sync(self._look)
        async with _scratch_mounts(self._root / "sandbox", host.user) as mounts:
            sandbox = await self.create(SandboxSpec(mounts, idle_s=30))
            try:
                channel = await sandbox.open_channel()
                await channel.aclose()
            finally:
                with anyio.CancelScope(shield=True):
                    await self.destroy(sandbox.id)
        bounded = ", ".join(sorted(host.cgroups.controllers)) or "nothing"
        return f"{host.program.version} works with {host.python}; control groups bound {bounded}"

    async def origin(self) -> str:
        """The runner with its Python, and bubblewrap.

        Raises:
            BackendUnavailable: one of them is missing.
        """
        host = await to_thread.run_sync(self._look)
        return f"{host.runner.name} {host.program.version}"

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        """Make and start a sandbox; returns once its runner has made its socket.

        Raises:
            BackendUnavailable: bubblewrap is missing or the kernel refuses.
            InsecureSandbox: it came out weaker than asked for.
            StorageUnavailable: the data root cannot be written.
        """
        host, spec, (sandbox_id, record, token) = await to_thread.run_sync(self._open, spec)
        try:
            record, told, line = await to_thread.run_sync(
                self._launch, host, spec, sandbox_id, record, token
            )
            await self._settle(host, spec, sandbox_id, record, told, line)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.destroy(sandbox_id)
            raise
        return self._residents.sandbox(sandbox_id, record, token)

    async def attach(self, sandbox_id: SandboxId) -> ProcessSandbox:
        """Find a running sandbox that this or another process made.

        Raises:
            SandboxGone: it is not running.
        """
        return await self._residents.attach(sandbox_id)

    async def relabel(self, sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:
        """Give a sandbox other labels than those that it was made with.

        Raises:
            SandboxGone: nothing is known of it.
            StorageUnavailable: the data root cannot be written.
        """
        await to_thread.run_sync(self._records.relabel, sandbox_id, labels)

    async def running(self) -> Sequence[SandboxInfo]:
        """The sandboxes of this data root; what dead ones left is removed."""
        await self._sweep()
        return await self._residents.running()

    async def destroy(self, sandbox_id: SandboxId) -> None:
        """End a sandbox with everything that runs in it; gone already is not an error.

        Raises:
            BackendUnavailable: the kernel does not let go of a process.
        """
        record = await to_thread.run_sync(self._records.find, sandbox_id)
        if record is not None:
            await self._remove(sandbox_id, record)
        await self._sweep()

    async def _remove(self, sandbox_id: SandboxId, record: Record) -> None:
        # With pid 1 of its process namespace the kernel ends all that is in it. bwrap then ends
        # by itself, after it has collected pid 1.
        ended = record.process is None or await kill(record.process)
        if ended and record.launcher is not None:
            await end(record.launcher, None, limit_s=_LAUNCHER_LIMIT_S)
            ended = await kill(record.launcher)
        if not ended:
            raise BackendUnavailable(
                f"the kernel does not end the processes of sandbox {sandbox_id}: one waits for a "
                "disk or a network file system; look at them with `ps`, then destroy it again"
            )
        self._residents.collect()
        await to_thread.run_sync(cgroups.remove, record.cgroups)
        await to_thread.run_sync(self._records.forget, sandbox_id)

    async def _sweep(self) -> None:
        for sandbox_id in await self._residents.abandoned():
            record = await to_thread.run_sync(self._records.find, sandbox_id)
            if record is not None:
                await self._remove(sandbox_id, record)

    def _look(self) -> Host:
        if self._host is None or not self._host.runner.is_dir():
            self._host = Host.look(self._root)
        return self._host

    def _open(self, spec: SandboxSpec) -> tuple[Host, SandboxSpec, tuple[SandboxId, Record, bytes]]:
        """What the sandbox can be here, and its new record with its id and its token."""
        host = self._look()
        spec = replace(spec, limits=host.possible(spec.limits))
        made = facts(host, spec)
        opened = self._records.open(made, spec.labels, host.user, cgroups=host.cgroups.paths)
        return host, spec, opened

    def _launch(
        self, host: Host, spec: SandboxSpec, sandbox_id: SandboxId, record: Record, token: bytes
    ) -> tuple[Record, Told, socket.socket]:
        """Start it under its limits, and remember its process; the line on which it speaks."""
        host.cgroups.create(sandbox_id, spec.limits)

        def admit(told: Told) -> tuple[Record, Told]:
            self._residents.adopt(told.launcher)
            host.cgroups.add(sandbox_id, told.pid, joined=order.joined)
            started = replace(record, process=identify(told.pid), launcher=identify(told.launcher))
            self._records.save(sandbox_id, started)
            return started, told

        own = {"MCP_SANDBOX_IDLE_S": f"{spec.idle_s:g}"}
        variables = beside_pid_1(environment(spec, _PATH, _HOME)) | own
        inside = host.inside(spec, variables, sandbox_id)
        directory = self._records.directory(sandbox_id)
        try:
            with ExitStack() as opened:
                line, starter = map(opened.enter_context, socket.socketpair())
                line.sendall(token.hex().encode())
                order = host.order(inside, sandbox_id, directory, starter.fileno())
                record, told = launch(order, admit)
                return record, told, socket.socket(fileno=line.detach())
        except NotStarted as exc:
            raise self._failed(sandbox_id) from exc
        except OSError as exc:
            what = f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
            raise BackendUnavailable(
                f"cannot start a sandbox ({what}): check that its directories are there and that "
                "the data directory is on a local file system"
            ) from exc

    async def _settle(
        self,
        host: Host,
        spec: SandboxSpec,
        sandbox_id: SandboxId,
        record: Record,
        told: Told,
        line: socket.socket,
    ) -> None:
        """Wait for the runner, look whether every wall stands, and take its directory away."""
        if not await _listens(line):
            raise await to_thread.run_sync(self._failed, sandbox_id)

        def look_and_close() -> None:
            bounded = host.resource_limits(spec.limits)
            verify.check(told.pid, spec, told.status, record.cgroups, bounded)
            if os.geteuid() == 0:
                sockets = self._records.socket_directory(sandbox_id)
                # Code inside can reach the socket there, and no longer replace it or add files.
                os.chown(sockets, 0, 0)
                sockets.chmod(0o711)

        try:
            await to_thread.run_sync(look_and_close)
        except FileNotFoundError as exc:
            raise await to_thread.run_sync(self._failed, sandbox_id) from exc

    def _failed(self, sandbox_id: SandboxId) -> BackendUnavailable:
        return BackendUnavailable(explain(self._records.log(sandbox_id), look()))


async def _listens(line: socket.socket) -> bool:
    """Wait until the runner says that it listens; False when it has ended or takes too long."""
    # Reset: it has ended before it took its token.
    with line, suppress(ConnectionResetError), anyio.move_on_after(_START_LIMIT_S):
        line.setblocking(False)
        await anyio.wait_readable(line)
        return bool(line.recv(1))
    return False


@asynccontextmanager
async def _scratch_mounts(parent: Path, user: int | None) -> AsyncGenerator[tuple[Mount, ...]]:
    """Empty directories for a sandbox that nobody will use."""

    def make() -> tempfile.TemporaryDirectory[str]:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".probe-", dir=parent)
        for name in ("workspace", "home"):
            folder = Path(scratch.name) / name
            folder.mkdir(mode=0o700)
            if user is not None:
                os.chown(folder, user, user)
        return scratch

    scratch = await to_thread.run_sync(make)
    try:
        folder = Path(scratch.name)
        yield Mount(folder / "workspace", "/workspace"), Mount(folder / "home", "/home/sandbox")
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(scratch.cleanup)
