"""`python -m benchmarks`: measures every figure, or those named, and shows them beside its goal."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from docker.errors import DockerException
from mcp import MCPError
from rich.console import Console

from benchmarks import (
    agent,
    agents,
    archives,
    audit,
    client,
    commands,
    crowd,
    doors,
    kubernetes,
    memory,
    notebooks,
    platform,
    policy,
    previews,
    processes,
    relays,
    skills,
    starts,
    transfer,
    web,
)
from benchmarks.measure import Outcome, Row
from benchmarks.places import Failed
from benchmarks.report import as_json, table
from mcp_sandbox.errors import SandboxError

ROWS = (
    *commands.ROWS,
    *processes.ROWS,
    *starts.ROWS,
    *relays.ROWS,
    *client.ROWS,
    *agent.ROWS,
    *agents.ROWS,
    *web.ROWS,
    *platform.ROWS,
    *transfer.ROWS,
    *archives.ROWS,
    *previews.ROWS,
    *doors.ROWS,
    *kubernetes.ROWS,
    *memory.ROWS,
    *skills.ROWS,
    *policy.ROWS,
    *audit.ROWS,
    *crowd.ROWS,
    *notebooks.ROWS,
)
_QUICK_PAIRS = 5


async def measure(rows: Sequence[Row], console: Console, *, quick: bool) -> list[Outcome]:
    """Measure one row after another; one that cannot run does not stop the others."""
    outcomes = []
    for row in rows:
        pairs = min(row.pairs, _QUICK_PAIRS) if quick else row.pairs
        with console.status(f"{row.name}: {row.ours}"):
            outcome = await _outcome(row, pairs)
        if outcome.measured is None:
            console.print(f"{row.name} could not run: {outcome.problem}", markup=False)
        outcomes.append(outcome)
    return outcomes


async def _outcome(row: Row, pairs: int) -> Outcome:
    problems: list[str] = []
    try:
        return Outcome(row, await row.run(pairs))
    except* (SandboxError, DockerException, MCPError, Failed, OSError) as group:
        while isinstance(group.exceptions[0], BaseExceptionGroup):
            group = group.exceptions[0]
        problems += map(str, group.exceptions)
    return Outcome(row, None, "; ".join(problems))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs: a look, not a figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values there")
    parser.add_argument(
        "--only",
        action="append",
        choices=[row.name for row in ROWS],
        metavar="NAME",
        help=f"measure only this, may be given again: {', '.join(row.name for row in ROWS)}",
    )
    return parser.parse_args()


def main() -> int:
    """Measure and show; 1 when something could not run, never because a goal was missed."""
    arguments = _arguments()
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    outcomes = anyio.run(
        partial(measure, rows, Console(stderr=True), quick=arguments.quick), backend="asyncio"
    )
    Console(width=None if sys.stdout.isatty() else 170).print(table(outcomes))
    if arguments.json:
        arguments.json.write_text(as_json(outcomes))
    return int(any(outcome.measured is None for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
