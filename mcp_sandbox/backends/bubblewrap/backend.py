"""The bubblewrap backend: a sandbox is a tree of unprivileged processes in its own namespaces."""

import errno
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.bubblewrap import cgroups, verify
from mcp_sandbox.backends.bubblewrap.host import Host, explain, facts, look
from mcp_sandbox.backends.bubblewrap.launch import NotStarted, launch
from mcp_sandbox.backends.sandbox_records import (
    ProcessId,
    SandboxRecord,
    SandboxRecords,
    end,
    identify,
    is_alive,
    kill,
    make_gone_error,
    new_id,
    reap,
)
from mcp_sandbox.errors import BackendUnavailable, SandboxError, SandboxGone

_CONNECT_LIMIT_S = 10.0
_LAUNCHER_LIMIT_S = 2.0
_START_LIMIT_S = 30.0
# When a process ends, its files in /proc vanish one by one, with these errors.
_GONE_FROM_PROC = frozenset({errno.ENOENT, errno.ESRCH, errno.EINVAL})
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessSandbox:
    """A running sandbox whose runner is `process`."""

    id: models.SandboxId
    token: bytes
    facts: models.SandboxFacts
    labels: Mapping[str, str]
    process: ProcessId
    sockets: Path
    cgroups: tuple[str, ...] = ()

    async def open_channel(self) -> ByteStream:
        return await local_socket.connect(self.sockets, deadline_s=_CONNECT_LIMIT_S)

    async def pause(self) -> bool:
        """Do nothing: waiting processes use no processor, and a stop would free no memory."""
        return False

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        await end(self.process, None, limit_s=within_s)

        def look() -> models.Ending | None:
            if is_alive(self.process):
                return None
            return "memory" if any(map(memory_kills, self.cgroups)) else "killed"

        return await to_thread.run_sync(look)


def memory_kills(group: str) -> int:
    """Return how many processes of a control group the kernel has killed for lack of memory."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (Path(group) / name).read_text().splitlines()
        except OSError:
            # Another hierarchy's group, or it has been removed.
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


class BubblewrapBackend:
    """Creates sandboxes with bwrap; no engine, no root, no image.

    A sandbox outlives its server until it is idle; any server of the data root can attach to it.
    Without `walls` it is unsafe-local: the same paths, users and limits, but no isolation.
    """

    holds_files = keeps_paused_files = takes_images = False

    def __init__(self, data_root: Path, *, walls: bool = True) -> None:
        self._root = data_root
        self._walls = walls
        self.name: models.BackendName = "bubblewrap" if walls else "unsafe-local"
        self._records = SandboxRecords(data_root, self.name)
        # Process numbers of this server's children; ended ones are waited for, against zombies.
        self._children: set[int] = set()
        self._host: Host | None = None

    async def probe(self) -> str:
        host = await to_thread.run_sync(self._look)
        # Any directory will do: it is not used.
        mounts = (models.Mount(host.runner, "/workspace", read_only=True),)
        try:
            sandbox = await self.create(models.SandboxSpec(mounts, idle_s=30))
        except SandboxGone as exc:
            # No other server knew the sandbox, so its start has failed.
            raise BackendUnavailable(str(exc)) from exc
        try:
            await (await sandbox.open_channel()).aclose()
        finally:
            with anyio.CancelScope(shield=True):
                await self.destroy(sandbox.id)
        bounded = ", ".join(sorted(host.cgroups.controllers)) or "nothing"
        works = f"{host.program.version} works with {host.python}; control groups bound {bounded}"
        return works if self._walls else f"{works}; NO isolation: code runs on this host"

    async def origin(self, image: str = "") -> str:  # noqa: ARG002 - it has none
        host = await to_thread.run_sync(self._look)
        return f"{host.runner.name} {host.program.version}"

    async def create(self, spec: models.SandboxSpec) -> ProcessSandbox:
        sandbox_id = new_id()
        try:
            record, token, line, check = await to_thread.run_sync(self._start, sandbox_id, spec)

            def finish() -> None:
                check()
                local_socket.hand_over(line, self._records.socket_directory(sandbox_id), token)

            with line:
                await self._settle(sandbox_id, line, finish)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.destroy(sandbox_id)
            raise
        return self._sandbox(sandbox_id, record, token)

    async def attach(self, sandbox_id: models.SandboxId) -> ProcessSandbox:
        self._collect()
        record, token = await to_thread.run_sync(self._records.known, sandbox_id)
        if not await to_thread.run_sync(lambda: record.alive):
            raise make_gone_error(sandbox_id)
        return self._sandbox(sandbox_id, record, token)

    def _sandbox(
        self, sandbox_id: models.SandboxId, record: SandboxRecord, token: bytes
    ) -> ProcessSandbox:
        if record.process is None or record.facts is None:
            raise make_gone_error(sandbox_id)
        sockets, process = self._records.socket_directory(sandbox_id), record.process
        return ProcessSandbox(
            sandbox_id, token, record.facts, record.labels, process, sockets, record.cgroups
        )

    async def relabel(self, sandbox_id: models.SandboxId, labels: Mapping[str, str]) -> None:
        await to_thread.run_sync(self._records.relabel, sandbox_id, labels)

    async def running(self) -> Sequence[models.SandboxInfo]:
        found = (await self._sweep()).items()
        return await to_thread.run_sync(
            lambda: [
                models.SandboxInfo(each, record.labels) for each, record in found if record.alive
            ]
        )

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        record = await to_thread.run_sync(self._records.find, sandbox_id)
        if record is not None:
            await self._remove(sandbox_id, record)
        await self._sweep()

    async def _remove(self, sandbox_id: models.SandboxId, record: SandboxRecord) -> None:
        # With pid 1 the kernel ends all processes of the namespace. bwrap waits for pid 1 and
        # then ends.
        ended = record.process is None or await kill(record.process)
        if ended and record.launcher is not None:
            await end(record.launcher, None, limit_s=_LAUNCHER_LIMIT_S)
            ended = await kill(record.launcher)
        if not ended:
            raise BackendUnavailable(
                f"the kernel does not end the processes of sandbox {sandbox_id}: one may wait for "
                "a disk or a network file system; find it with `ps`, then destroy it again"
            )
        self._collect()
        await to_thread.run_sync(cgroups.remove, record.cgroups)
        await to_thread.run_sync(self._records.forget, sandbox_id)

    async def _sweep(self) -> dict[models.SandboxId, SandboxRecord]:
        """Remove what dead sandboxes left; return all records found before that."""
        self._collect()
        found = await to_thread.run_sync(self._records.all)
        for each in await to_thread.run_sync(lambda: [n for n in found if found[n].abandoned]):
            await self._remove(each, found[each])
        return found

    def _collect(self) -> None:
        # A copy: a thread that starts a sandbox may add its own meanwhile.
        self._children -= {pid for pid in tuple(self._children) if reap(pid)}

    def _look(self) -> Host:
        if self._host is None or not self._host.runner.is_dir():
            self._host = Host(self._root, walls=self._walls)
        return self._host

    def _start(
        self, sandbox_id: models.SandboxId, spec: models.SandboxSpec
    ) -> tuple[SandboxRecord, bytes, socket.socket, Callable[[], None]]:
        """Start it with its limits; return its record, token, a socket to it, and its check."""
        host = self._look()
        spec = host.possible(spec)
        if not self._walls:
            _logger.warning("unsafe-local: code runs on this host with no isolation")
        groups = host.cgroups.paths(sandbox_id)
        record = SandboxRecord(
            self.name, labels=dict(spec.labels), facts=facts(host, spec), cgroups=groups
        )
        token = self._records.open(sandbox_id, record)
        host.cgroups.create(sandbox_id, spec.limits)

        def admit(told: verify.BwrapStatus) -> tuple[SandboxRecord, verify.BwrapStatus]:
            self._children.add(told.launcher)
            host.cgroups.add(sandbox_id, told.pid, joined=joined)
            started = replace(record, process=identify(told.pid), launcher=identify(told.launcher))
            self._records.save(sandbox_id, started)
            return started, told

        directory, inside = self._records.directory(sandbox_id), host.inside(spec, sandbox_id)
        joined = host.cgroups.joinable(sandbox_id) if host.is_root else ()
        try:
            with ExitStack() as opened:
                line, starter = map(opened.enter_context, socket.socketpair())
                starts = starter.fileno()
                record, told = launch(host, inside, directory, joined, starts, admit)
                limits = host.resource_limits(spec)
                check = partial(verify.check, told, spec, record.cgroups, limits, walls=self._walls)
                return record, token, socket.socket(fileno=line.detach()), check
        except NotStarted as exc:
            raise BackendUnavailable(explain(self._said(sandbox_id), look())) from exc
        except OSError as exc:
            what = f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
            raise BackendUnavailable(
                f"cannot start a sandbox ({what}): check that its directories are there and that "
                "the data directory is on a local file system"
            ) from exc

    async def _settle(
        self, sandbox_id: models.SandboxId, line: socket.socket, finish: Callable[[], None]
    ) -> None:
        """Wait for the runner, check the isolation, and give it what it serves with."""
        if not await local_socket.await_runner(line, within_s=_START_LIMIT_S):
            raise await to_thread.run_sync(self._ended, sandbox_id)
        try:
            await to_thread.run_sync(finish)
        except OSError as exc:
            if exc.errno not in _GONE_FROM_PROC:
                raise
            raise await to_thread.run_sync(self._ended, sandbox_id) from exc

    def _said(self, sandbox_id: models.SandboxId) -> str:
        log = self._records.directory(sandbox_id) / "log"
        return log.read_bytes()[-2000:].decode(errors="replace").strip() if log.exists() else ""

    def _ended(self, sandbox_id: models.SandboxId) -> SandboxError:
        """Return the error for a sandbox that ended during its start, from bwrap's log if any."""
        # The next start looks at the host, and at the copy of the runner, again.
        self._host = None
        if said := self._said(sandbox_id):
            return BackendUnavailable(explain(said, look()))
        return SandboxGone(
            "the sandbox ended while it was started, without a message: call again; if it happens "
            "again, run `mcp-sandbox doctor` to see what is wrong"
        )
