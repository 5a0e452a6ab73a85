"""What this host offers to bubblewrap sandboxes: looked at once, used by every start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcp_sandbox.backends import runner_copy
from mcp_sandbox.backends.bubblewrap import rlimits, seccomp
from mcp_sandbox.backends.bubblewrap.arguments import Inside, System, look_at_system, sources
from mcp_sandbox.backends.bubblewrap.cgroups import Cgroups
from mcp_sandbox.backends.bubblewrap.etc import etc
from mcp_sandbox.backends.bubblewrap.launch import Order
from mcp_sandbox.backends.bubblewrap.program import Program, find_bwrap, find_python
from mcp_sandbox.models import Limits, SandboxId, SandboxSpec

_SANDBOX_USER = 10001
_RUNNER = "/opt/mcp-sandbox"


@dataclass(frozen=True)
class Host:
    """`user` is whom sandboxes run as when the server is root, else None: the server's own."""

    program: Program
    python: Path
    runner: Path
    cgroups: Cgroups
    system: System
    filter: bytes
    user: int | None
    uid: int
    gid: int
    processors: int

    @classmethod
    def look(cls, data_root: Path) -> "Host":
        """Look at this host. Blocks, the first time for as long as it takes to copy the runner.

        Raises:
            BackendUnavailable: a program or a filter is missing; the message has the remedy.
            StorageUnavailable: the data root cannot be written.
        """
        program, python = find_bwrap(), find_python()
        root = os.geteuid() == 0
        return cls(
            program=program,
            python=python,
            runner=runner_copy.install(data_root, python),
            cgroups=Cgroups.here(),
            system=look_at_system(),
            filter=seccomp.program(os.uname().machine),
            user=_SANDBOX_USER if root else None,
            uid=_SANDBOX_USER if root else os.geteuid(),
            gid=_SANDBOX_USER if root else os.getegid(),
            processors=len(os.sched_getaffinity(0)),
        )

    def possible(self, limits: Limits) -> Limits:
        """The same limits, with no more processors than there are here."""
        return replace(limits, cpus=min(limits.cpus, self.processors))

    def resource_limits(self, limits: Limits) -> dict[int, int]:
        """What bounds each process of a sandbox here."""
        bounded = "memory" in self.cgroups.controllers
        return rlimits.wanted(limits, memory_by_process=not bounded)

    def inside(
        self, spec: SandboxSpec, environment: Mapping[str, str], sandbox_id: SandboxId
    ) -> Inside:
        """What a sandbox of that spec holds here."""
        return Inside(
            uid=self.uid,
            gid=self.gid,
            network=spec.network,
            limits=spec.limits,
            mounts=spec.mounts,
            environment={**environment, **rlimits.settings(self.resource_limits(spec.limits))},
            memory_group=self.cgroups.memory_view(sandbox_id),
        )

    def order(self, inside: Inside, sandbox_id: SandboxId, directory: Path, starter: int) -> Order:
        """How to start it, with its run directory. Blocks on the disk."""
        return Order(
            program=self.program,
            # An ordinary Python, whose environment is ours alone: see the runner's __main__.
            command=(str(self.python), f"{_RUNNER}/{runner_copy.MAIN}"),
            inside=inside,
            system=self.system,
            etc=etc(self.uid, self.gid, inside.network),
            filter=self.filter,
            starter=starter,
            sources=sources(inside, self.runner, directory / "sock"),
            user=self.user,
            joined=self.cgroups.joinable(sandbox_id) if self.user is not None else (),
            log=directory / "log",
        )
