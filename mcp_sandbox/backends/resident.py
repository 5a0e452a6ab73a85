"""Sandboxes that are processes of this host: what bubblewrap and unsafe-local share.

How such a sandbox is reached, found again by another server, listed, and forgotten once it is
dead. How it is isolated and how it is ended is each backend's own.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.process import ProcessId, end, has_ended, hold, is_alive, reap
from mcp_sandbox.backends.records import Record, Records
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import Ending, SandboxFacts, SandboxId, SandboxInfo

_CONNECT_LIMIT_S = 10.0
_START_LIMIT_S = 30.0


@dataclass(frozen=True)
class ProcessSandbox:
    """A running sandbox whose runner is `process`."""

    id: SandboxId
    token: bytes
    facts: SandboxFacts
    labels: Mapping[str, str]
    process: ProcessId
    sockets: Path
    cgroups: tuple[str, ...] = ()

    async def open_channel(self) -> ByteStream:
        """Connect to the runner inside.

        Raises:
            SandboxGone: it is not running, or its runner does not listen.
        """
        descriptor = await to_thread.run_sync(hold, self.process)
        with _held(descriptor) as watched:
            return await local_socket.connect(
                self.sockets,
                deadline_s=_CONNECT_LIMIT_S,
                has_ended=lambda: watched is None or has_ended(watched),
            )

    async def pause(self) -> bool:
        """Nothing is done: processes that wait use no processor, and a stop frees no memory."""
        return False

    async def resume(self) -> None:
        """It is never paused."""

    async def ending(self, *, within_s: float = 0.0) -> Ending | None:
        """What it ended of; None if it still runs after `within_s`."""
        await end(self.process, None, limit_s=within_s)
        return await to_thread.run_sync(self._ending)

    def _ending(self) -> Ending | None:
        if is_alive(self.process):
            return None
        return "memory" if any(map(memory_kills, self.cgroups)) else "killed"


def memory_kills(group: str) -> int:
    """How often the kernel has killed in a control group because its memory was used up."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (Path(group) / name).read_text().splitlines()
        except OSError:
            # Another hierarchy's group, or it has been removed.
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


@contextmanager
def _held(descriptor: int | None) -> Iterator[int | None]:
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


class Residents:
    """The sandboxes of one backend under one data root."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._children: set[int] = set()

    def adopt(self, pid: int) -> None:
        """Remember a child process of ours that must be collected when it ends."""
        self._children.add(pid)

    def collect(self) -> None:
        """Collect the children that have ended, so that no zombies stay."""
        self._children -= {pid for pid in set(self._children) if reap(pid)}

    async def started(self, sandbox_id: SandboxId, process: ProcessId) -> bool:
        """Wait until the runner has made its socket; False when it ended or took too long."""
        descriptor = await to_thread.run_sync(hold, process)
        with _held(descriptor) as watched, anyio.move_on_after(_START_LIMIT_S):
            return await local_socket.wait_until_bound(
                self._records.socket_directory(sandbox_id),
                has_ended=lambda: watched is None or has_ended(watched),
            )
        return False

    async def attach(self, sandbox_id: SandboxId) -> ProcessSandbox:
        """Find a running sandbox that this or another process made.

        Raises:
            SandboxGone: it is not running.
        """
        self.collect()
        record, token = await to_thread.run_sync(self._records.living, sandbox_id)
        return self.sandbox(sandbox_id, record, token)

    def sandbox(self, sandbox_id: SandboxId, record: Record, token: bytes) -> ProcessSandbox:
        """The sandbox of a record that has a process."""
        if record.process is None:
            raise SandboxGone(f"sandbox {sandbox_id} was never started; try again")
        sockets = self._records.socket_directory(sandbox_id)
        return ProcessSandbox(
            sandbox_id,
            token,
            record.facts,
            record.labels,
            record.process,
            sockets,
            record.cgroups,
        )

    async def running(self) -> list[SandboxInfo]:
        """The sandboxes that run now."""
        self.collect()
        found = await to_thread.run_sync(self._records.all)
        alive = await to_thread.run_sync(lambda: [each for each in found if found[each].alive])
        return [SandboxInfo(each, found[each].labels) for each in alive]

    async def abandoned(self) -> list[SandboxId]:
        """The dead sandboxes whose directories are still there."""
        self.collect()
        found = await to_thread.run_sync(self._records.all)
        return await to_thread.run_sync(lambda: [each for each in found if found[each].abandoned])
