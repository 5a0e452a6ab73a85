"""The unsafe-local backend: the real runner as a plain process of this host, with no isolation.

For this project's own tests and demos. Code in such a sandbox does what the server's user may do.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.backends import runner_copy
from mcp_sandbox.backends.process import Start, end, identify, kill, start, stop_below
from mcp_sandbox.backends.records import Record, Records
from mcp_sandbox.backends.resident import ProcessSandbox, Residents
from mcp_sandbox.backends.runner_environment import environment
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import BackendName, SandboxFacts, SandboxId, SandboxInfo, SandboxSpec

_PATH = "/usr/local/bin:/usr/bin:/bin"
_POLITE_S = 3.0
_SOCKET = "runner.sock"
_LIMITS = ("memory", "cpus", "pids", "tmp", "shm", "open_files", "file_size")
_NO_LIMIT = "not limited: no isolation"
_FACTS = SandboxFacts(
    backend="unsafe-local",
    image=None,
    isolation="no isolation: code runs on the host as the server's own user",
    network="open: the host's own network",
    limits=dict.fromkeys(_LIMITS, _NO_LIMIT),
)

_logger = logging.getLogger(__name__)


class UnsafeLocalBackend:
    """Starts runners without any isolation; never chosen unless it is named."""

    def __init__(self, data_root: Path) -> None:
        self._root = data_root
        self._records = Records(data_root, "unsafe-local")
        self._residents = Residents(self._records)
        self._runner: Path | None = None

    @property
    def name(self) -> BackendName:
        return "unsafe-local"

    async def probe(self) -> str:
        """One line that says what works here.

        Raises:
            BackendUnavailable: this Python cannot run the runner.
        """
        await to_thread.run_sync(self._install)
        return f"unsafe-local runs code on this host with {sys.executable} and NO isolation"

    async def origin(self) -> str:
        """The runner and its Python.

        Raises:
            BackendUnavailable: this Python cannot run the runner.
        """
        return (await to_thread.run_sync(self._install)).name

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        """Start a runner; returns once it has made its socket.

        Raises:
            BackendUnavailable: it does not start.
            StorageUnavailable: the data root cannot be written.
        """
        _logger.warning(
            "unsafe-local: code runs on this host as user %d with no isolation", os.geteuid()
        )
        sandbox_id, record, token = await to_thread.run_sync(
            self._records.open, _FACTS, spec.labels, None
        )
        try:
            record = await to_thread.run_sync(self._launch, spec, sandbox_id, record, token)
            await self._settle(sandbox_id, record)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.destroy(sandbox_id)
            raise
        return self._residents.sandbox(sandbox_id, record, token)

    async def _settle(self, sandbox_id: SandboxId, record: Record) -> None:
        if record.process and await self._residents.started(sandbox_id, record.process):
            return
        said = await to_thread.run_sync(self._records.log, sandbox_id)
        raise BackendUnavailable(
            f"the runner did not start ({said.strip()[-500:] or 'it said nothing'}): check that "
            f"{sys.executable} is a complete Python"
        )

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
        """End the runner with everything below it; gone already is not an error.

        Raises:
            BackendUnavailable: the kernel does not let go of a process.
        """
        record = await to_thread.run_sync(self._records.find, sandbox_id)
        if record is not None:
            await self._remove(sandbox_id, record)
        await self._sweep()

    async def _remove(self, sandbox_id: SandboxId, record: Record) -> None:
        process = record.process
        # The runner ends its tree when it is asked to; a stopped or broken one does not.
        if process and not await end(process, signal.SIGTERM, limit_s=_POLITE_S):
            below = await to_thread.run_sync(stop_below, process.pid)
            if not all([await kill(each) for each in (process, *below)]):
                raise BackendUnavailable(
                    f"the kernel does not end the processes of sandbox {sandbox_id}: look at "
                    "them with `ps`, then destroy it again"
                )
        self._residents.collect()
        await to_thread.run_sync(self._records.forget, sandbox_id)

    async def _sweep(self) -> None:
        for sandbox_id in await self._residents.abandoned():
            await to_thread.run_sync(self._records.forget, sandbox_id)

    def _install(self) -> Path:
        if self._runner is None or not self._runner.is_dir():
            self._runner = runner_copy.install(self._root, Path(sys.executable))
        return self._runner

    def _launch(
        self, spec: SandboxSpec, sandbox_id: SandboxId, record: Record, token: bytes
    ) -> Record:
        places = {mount.target: str(mount.source) for mount in spec.mounts}
        runner = self._install()
        own = {
            "MCP_SANDBOX_TOKEN": token.hex(),
            "MCP_SANDBOX_IDLE_S": f"{spec.idle_s:g}",
            "MCP_SANDBOX_WORKSPACE": places["/workspace"],
            "MCP_SANDBOX_HOME": places["/home/sandbox"],
            # Beside where it starts: a whole path may be longer than a socket address holds.
            "MCP_SANDBOX_SOCKET": _SOCKET,
        }
        path = f"{Path(sys.executable).parent}:{_PATH}"
        with (self._records.directory(sandbox_id) / "log").open("ab") as log:
            pid = start(
                Start(
                    runner_copy.start_command(sys.executable, str(runner)),
                    env=environment(spec, path, places["/home/sandbox"]) | own,
                    stderr=log.fileno(),
                    directory=str(self._records.socket_directory(sandbox_id)),
                )
            )
        self._residents.adopt(pid)
        started = replace(record, process=identify(pid))
        self._records.save(sandbox_id, started)
        return started
