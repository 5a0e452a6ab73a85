"""The counts of a run for people: one line for each fault, then what went wrong in words."""

from collections.abc import Sequence

from tests.e2e.endurance.tally import Tally
from tests.e2e.faults.run import Report

_COLUMNS = (
    "blows",
    "calls",
    "answered",
    "cut off",
    "acknowledged",
    "checked",
    "late",
    "lost",
    "1st call",
    "2nd",
    "later",
    "never",
    "works in",
    "owned in",
    "left",
    "broken",
)
_ODD_SHOWN = 4
_OF_RUNS = "processes "


def table(reports: Sequence[Report], seed: int) -> str:
    """A line for each fault; times are the longest ones, after the blow."""
    heads = "".join(f"{head:>13}" for head in _COLUMNS)
    lines = [f"faults, seed {seed}", f"{'':<24}{heads}"]
    for report in reports:
        name = f"{report.fault} ({report.backend})"
        lines.append(f"{name:<24}" + "".join(f"{cell:>13}" for cell in _cells(report)))
    for report in reports:
        struck = ", ".join(f"{count} {what}" for what, count in sorted(report.blows.items()))
        lines.append(f"  {report.fault}: {struck}")
        if started := report.tally.counts[f"{_OF_RUNS}started"]:
            ends = [f"{started} started", *_ends(report.tally)]
            lines.append(f"    processes: {', '.join(ends)}")
        lines += [f"    BROKEN {told[:1000]}" for told in report.tally.faults]
        lines += [
            f"    odd    {told[:200].splitlines()[0]}"
            for told in report.tally.oddities[:_ODD_SHOWN]
        ]
    return "\n".join(lines) + "\n"


def _ends(tally: Tally) -> list[str]:
    names = (
        *("that are cells", "that ended as they should", "killed", "that ended with their sandbox"),
        *("told", "asked for", "told to a call cut off", "of cut off starts", "lost"),
    )
    told = [f"{tally.counts[_OF_RUNS + name]} {name}" for name in names]
    return [*told, f"{tally.counts['told twice']} told twice"]


def _cells(report: Report) -> list[str]:
    counts, tries = report.tally.counts, report.tries
    return [
        f"{report.blows.total():,}",
        f"{counts['calls']:,}",
        f"{counts['answered']:,}",
        f"{counts['ended by a kill'] + counts['odd errors after a kill']:,}",
        f"{counts['acknowledged changes']:,}",
        f"{counts['files checked']:,}",
        f"{counts['unacknowledged changes that happened late']:,}",
        f"{counts['lost or wrong files']:,}",
        f"{tries[1]:,}",
        f"{tries[2]:,}",
        f"{sum(count for number, count in tries.items() if number > 2):,}",
        f"{counts['chats that did not work again']:,}",
        f"{report.working_s:.1f} s",
        f"{report.unowned_s:.1f} s",
        f"{sum(report.left.values()):,}",
        f"{len(report.tally.faults):,}",
    ]
