"""Tells what a sandbox lacks of what skills need, before any chat has one.

One new sandbox with the settings of all others is asked, and ends with that. None is made where
nothing is needed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anyio import to_thread

from mcp_sandbox.app import open_session, temporary_data
from mcp_sandbox.config import Config
from mcp_sandbox.models import ExecResult
from mcp_sandbox.sessions import preflight
from mcp_sandbox.skills.findings import Required, scan
from mcp_sandbox.skills.models import Findings, Unmet
from mcp_sandbox.skills.preflight import Inventory, unmet

if TYPE_CHECKING:
    from mcp_sandbox.sessions.session import Session

_TIMEOUT_S = 20.0
Needs = Mapping[str, tuple[Findings, tuple[Required, ...]]]


async def lacking(
    skills: Mapping[str, Mapping[str, bytes]], config: Config
) -> Mapping[str, Sequence[Unmet]]:
    """Return what is lacking, by the names under which the skills' files are given.

    Raises:
        OperatorError: no sandbox can be made.
        Unsupported: it cannot be asked.
    """
    scanned = await to_thread.run_sync(_scanned, skills)
    needs = {(need.kind, need.name): need for _, all_ in scanned.values() for need in all_}
    if not needs:
        return dict.fromkeys(skills, ())
    async with temporary_data() as data:
        alone = config.model_copy(update={"data_dir": data})
        async with open_session("preflight", config=alone) as session:
            network = config.network == "open" or session.backend == "unsafe-local"
            run = partial(_run, session)
            inventory = await preflight.ask(run, list(needs.values()), network=network)
    return await to_thread.run_sync(_unmet, scanned, inventory)


def _scanned(skills: Mapping[str, Mapping[str, bytes]]) -> Needs:
    return {name: scan(files) for name, files in skills.items()}


def _unmet(scanned: Needs, inventory: Inventory) -> Mapping[str, Sequence[Unmet]]:
    return {name: unmet(needs, inventory) for name, (_, needs) in scanned.items()}


async def _run(session: "Session", command: Sequence[str], given: bytes) -> ExecResult:
    return await session.exec(command, stdin=given, timeout_s=_TIMEOUT_S)
