"""Shows what was measured: a table for people, JSON for programs."""

import json
import os
import platform
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.measure import Measured, Outcome, Row


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line per row: both sides' medians, the judged value, its range and its goal."""
    shown = Table(title="ours against the alternative: medians, pair by pair")
    for heading in ("name", "ours", "alternative"):
        shown.add_column(heading, overflow="fold")
    for heading in ("ours ms", "alternative ms", "median", "min to max", "goal"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for outcome in outcomes:
        shown.add_row(*cells(outcome))
    return shown


def cells(outcome: Outcome) -> tuple[str, ...]:
    """The texts of one line."""
    row, measured = outcome.row, outcome.measured
    names = (row.name, row.ours, row.theirs)
    if measured is None:
        return (*names, "", "", "", "", str(row.goal), "[red]could not run[/]")
    low, high = min(measured.values), max(measured.values)
    return (
        *names,
        _milliseconds(measured.ours_s, row.calls),
        _milliseconds(measured.theirs_s, row.calls),
        f"{_short(measured.median)} {row.goal.unit}",
        f"{_short(low)} to {_short(high)}",
        str(row.goal),
        "[green]held[/]" if outcome.held else "[yellow]missed[/]",
    )


def _milliseconds(seconds: Sequence[float], calls: int) -> str:
    return _short(median(seconds) * 1000 / calls) if seconds else "-"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Everything that was measured, with the machine it was measured on."""
    machine = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
    rows = [_record(outcome) for outcome in outcomes]
    return json.dumps({"machine": machine, "rows": rows}, indent=1)


def _record(outcome: Outcome) -> dict[str, Any]:
    row = outcome.row
    found: dict[str, Any] = {
        "name": row.name,
        "ours": row.ours,
        "alternative": row.theirs,
        "goal": str(row.goal),
    }
    if outcome.measured is None:
        return {**found, "problem": outcome.problem}
    return {**found, "held": outcome.held, **_figures(row, outcome.measured)}


def _figures(row: Row, measured: Measured) -> dict[str, Any]:
    return {
        "unit": row.goal.unit,
        "median": measured.median,
        "min": min(measured.values),
        "max": max(measured.values),
        "values": measured.values,
        "calls": row.calls,
        "ours_s": measured.ours_s,
        "alternative_s": measured.theirs_s,
    }
