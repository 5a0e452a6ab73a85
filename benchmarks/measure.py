"""Measures two sides in turns and judges the ratio of each pair."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import anyio

Action = Callable[[], Awaitable[object]]
# Does something once and returns how many seconds the measured part of it took.
Side = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class Goal:
    """What the median is held against: a factor ("x") or an amount ("MiB")."""

    limit: float
    unit: str = "x"
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}"


@dataclass(frozen=True)
class Measured:
    """The judged values (ratios or amounts), and the seconds of both sides they came from."""

    values: tuple[float, ...]
    ours_s: tuple[float, ...] = ()
    theirs_s: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Row:
    """One figure: what is measured, against what, and how.

    `run` takes how many pairs (or single values) are wanted. `calls` says how many calls one
    measured time is of.
    """

    name: str
    ours: str
    theirs: str
    goal: Goal
    run: Callable[[int], Awaitable[Measured]]
    pairs: int = 30
    calls: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a row: figures, or why there are none."""

    row: Row
    measured: Measured | None
    problem: str = ""

    @property
    def held(self) -> bool | None:
        return None if self.measured is None else self.row.goal.holds(self.measured.median)


def clocked(action: Action) -> Side:
    """The side whose whole action is measured."""

    async def side() -> float:
        started = time.perf_counter()
        await action()
        return time.perf_counter() - started

    return side


def rested(side: Side, rest_s: float) -> Side:
    """The side, begun after a rest: for pairs in which an engine goes on working after a turn.

    Without it the turn of one side would pay for the other's clearing up.
    """

    async def later() -> float:
        await anyio.sleep(rest_s)
        return await side()

    return later


async def times_slower(ours: Side, theirs: Side, pairs: int) -> Measured:
    """How many times longer ours takes than theirs, pair by pair."""
    mine, other = await _in_turns(ours, theirs, pairs)
    return Measured(tuple(a / b for a, b in zip(mine, other, strict=True)), mine, other)


async def times_faster(ours: Side, theirs: Side, pairs: int) -> Measured:
    """How many times longer theirs takes than ours, pair by pair."""
    mine, other = await _in_turns(ours, theirs, pairs)
    return Measured(tuple(b / a for a, b in zip(mine, other, strict=True)), mine, other)


async def _in_turns(
    ours: Side, theirs: Side, pairs: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    # The first turn of each loads what is loaded once, and does not count.
    await ours()
    await theirs()
    taken = [(await ours(), await theirs()) for _ in range(pairs)]
    return tuple(a for a, _ in taken), tuple(b for _, b in taken)
