"""What judging and recording cost: a call with both and with neither, and lines a second."""

import time
from functools import partial

import anyio

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, checked, configured
from mcp_sandbox.app.chats import open_manager, temporary_data
from mcp_sandbox.audit import open_audit
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.models import BackendName
from mcp_sandbox.sessions.session import Session

_WAITING, _LINES_EACH = 64, 50
_LINE = {"user": "local", "chat": "demo", "tool": "exec", "digest": "0" * 64, "exit": 0}


async def _calls(pairs: int, *, backend: BackendName) -> Measured:
    async with temporary_data() as data, temporary_data() as other:
        ours = await configured(data, backend)
        theirs = await configured(other, backend)
        theirs = theirs.model_copy(update={"audit": AuditConfig(enabled=False)})
        async with open_manager(ours) as judging, open_manager(theirs) as silent:
            judged = await judging.session(CHAT, judged=True)
            plain = await silent.session(CHAT)
            mine, others = (clocked(partial(_true, each)) for each in (judged, plain))
            return await times_slower(mine, others, pairs)


async def _true(session: Session) -> None:
    checked(await session.exec("true"), "")


async def _lines(rounds: int) -> Measured:
    """Lines a second, each of which is on the disk before its writer goes on."""
    async with (
        temporary_data() as data,
        open_audit(data / "audit", AuditConfig(sync="each")) as audit,
    ):

        async def write() -> None:
            for _ in range(_LINES_EACH):
                await audit.write("ended", **_LINE)

        found = list[float]()
        for _ in range(rounds):
            began_s = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(_WAITING):
                    tasks.start_soon(write)
            found.append(_WAITING * _LINES_EACH / (time.perf_counter() - began_s))
        return Measured(tuple(found))


ROWS = (
    *(
        Row(
            f"calls-{backend}",
            f"exec true, judged and recorded, {backend}",
            "exec true, neither",
            Goal(1.05),
            partial(_calls, backend=backend),
            pairs=1000,
        )
        for backend in ("docker", "bubblewrap")
    ),
    Row(
        "audit",
        f"lines of the audit on the disk, {_WAITING} waiting",
        "-",
        Goal(10_000, "lines/s", at_least=True),
        _lines,
        pairs=10,
    ),
)
