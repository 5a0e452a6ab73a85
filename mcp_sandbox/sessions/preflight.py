"""Tells what a skill's scripts use, and what of that the sandbox of a chat lacks.

The scripts of a version are read once. The sandbox is asked anew each time: that takes some tens
of milliseconds, and what an agent has installed meanwhile counts.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.errors import Unsupported
from mcp_sandbox.models import ExecResult
from mcp_sandbox.sessions.rooms import Held
from mcp_sandbox.skills.findings import MAX_BYTES, Required, scan, worth_reading
from mcp_sandbox.skills.inventory import COMMAND, question, read_inventory
from mcp_sandbox.skills.models import Contents, Findings, SkillFile, Unmet
from mcp_sandbox.skills.preflight import Inventory, unmet

_MOST_KNOWN = 500
_TIMEOUT_S = 10.0
# So many names come back whole in one answer.
_ASKED_AT_ONCE = 200

Read = Callable[[SkillFile], Awaitable[bytes]]
Run = Callable[[Sequence[str], bytes], Awaitable[ExecResult]]


@dataclass(frozen=True)
class Scanned:
    """What the scripts of a skill use, and what must be there to run them."""

    findings: Findings
    needs: tuple[Required, ...]

    @property
    def is_empty(self) -> bool:
        """It has no scripts, or they use nothing."""
        return not self.needs and self.findings == Findings()


class Scans:
    """What was read of skills, by the digests of their files."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Scanned] = OrderedDict()
        self._limiter = CapacityLimiter(1)

    async def of(self, contents: Contents, read: Read) -> Scanned:
        """What the files use, and need; `read` gives the bytes of one."""
        known = self._known.get(contents.digest)
        if known is None:
            files, others = await _scripts(contents, read)
            known = Scanned(*await to_thread.run_sync(scan, files, others, limiter=self._limiter))
            self._known[contents.digest] = known
        self._known.move_to_end(contents.digest)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return known


async def _scripts(contents: Contents, read: Read) -> tuple[dict[str, bytes], list[str]]:
    """The files that scripts may be in, and the paths of the others."""
    files: dict[str, bytes] = {}
    others: list[str] = []
    left = MAX_BYTES
    for file in contents.files:
        if worth_reading(file.path, file.size) and file.kind == "text" and file.size <= left:
            files[file.path] = await read(file)
            left -= file.size
        else:
            others.append(file.path)
    return files, others


async def ask(run: Run, needs: Sequence[Required], *, network: bool) -> Inventory:
    """What a sandbox has of what is needed; `run` runs a command in it with a standard input.

    Raises:
        Unsupported: it does not tell.
    """
    found = Inventory(network=network)
    for begin in range(0, len(needs), _ASKED_AT_ONCE):
        result = await run(COMMAND, question(needs[begin : begin + _ASKED_AT_ONCE]))
        try:
            found |= read_inventory(result.stdout)
        except ValueError as exc:
            raise Unsupported(f"the sandbox did not tell what it has: {exc}") from exc
    return found


async def lacking(scanned: Scanned, held: Held) -> tuple[Unmet, ...]:
    """What the sandbox lacks.

    Raises:
        CallerError: it does not tell.
        SandboxGone: it died meanwhile.
    """

    async def run(command: Sequence[str], given: bytes) -> ExecResult:
        return await held.runtime.exec(command, stdin=given, timeout_s=_TIMEOUT_S)

    network = not held.facts.network.startswith("none")
    inventory = await ask(run, scanned.needs, network=network)
    return await to_thread.run_sync(unmet, scanned.needs, inventory)
