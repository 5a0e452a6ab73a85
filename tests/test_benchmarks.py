"""The harness of the benchmarks, on toy sides that need no time: no timing is asserted."""

import json
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
from rich.console import Console

from benchmarks.__main__ import ROWS, measure
from benchmarks.measure import Goal, Measured, Outcome, Row, Side, clocked, times_faster
from benchmarks.measure import times_slower as slower
from benchmarks.places import Failed
from benchmarks.report import as_json, cells, table
from mcp_sandbox.errors import BackendUnavailable


def scripted(seconds: list[float], turns: list[str], name: str) -> Side:
    """A side that claims to have taken those seconds, one after another."""
    left = iter(seconds)

    async def side() -> float:
        turns.append(name)
        return next(left)

    return side


def toy(run: Callable[[int], Awaitable[Measured]], goal: Goal) -> Row:
    return Row("toy", "ours", "theirs", goal, run)


async def test_ratios_are_taken_pair_by_pair_after_one_turn_that_does_not_count() -> None:
    turns: list[str] = []
    ours = scripted([9.0, 2.0, 6.0, 4.0], turns, "A")
    theirs = scripted([1.0, 1.0, 2.0, 8.0], turns, "B")
    measured = await slower(ours, theirs, 3)
    assert measured == Measured((2.0, 3.0, 0.5), (2.0, 6.0, 4.0), (1.0, 2.0, 8.0))
    assert measured.median == 2.0
    assert "".join(turns) == "ABABABAB"


async def test_times_faster_is_the_other_way_round() -> None:
    ours, theirs = scripted([1.0, 2.0], [], "A"), scripted([1.0, 50.0], [], "B")
    assert (await times_faster(ours, theirs, 1)).values == (25.0,)


async def test_a_clocked_side_takes_as_long_as_its_action() -> None:
    done = anyio.Event()

    async def action() -> None:
        done.set()

    with anyio.fail_after(5):
        assert await clocked(action)() > 0
    assert done.is_set()


@pytest.mark.parametrize(
    ("goal", "value", "held", "text"),
    [
        (Goal(1.2), 1.2, True, "≤ 1.2 x"),
        (Goal(1.2), 1.3, False, "≤ 1.2 x"),
        (Goal(20, at_least=True), 20.0, True, "≥ 20 x"),
        (Goal(20, at_least=True), 19.0, False, "≥ 20 x"),
        (Goal(32, "MiB"), 5.0, True, "≤ 32 MiB"),
    ],
)
def test_a_goal_is_an_upper_or_a_lower_bound(
    goal: Goal, value: float, held: bool, text: str
) -> None:
    assert goal.holds(value) is held
    assert str(goal) == text


@pytest.mark.parametrize("problem", [Failed("no answer"), BackendUnavailable("no answer")])
async def test_a_row_that_cannot_run_says_why_and_lets_the_others_run(problem: Exception) -> None:
    async def fails(pairs: int) -> Measured:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.lowlevel.checkpoint)
            raise problem
        return Measured((float(pairs),))

    async def works(pairs: int) -> Measured:
        return Measured((float(pairs),))

    rows = [toy(fails, Goal(1)), toy(works, Goal(1))]
    failed, worked = await measure(rows, Console(quiet=True), quick=True)
    assert (failed.measured, failed.problem, failed.held) == (None, "no answer", None)
    assert worked.measured == Measured((5.0,))
    assert worked.held is False


def test_report_shows_medians_range_goal_and_verdict() -> None:
    async def unused(pairs: int) -> Measured:
        raise AssertionError(pairs)

    measured = Measured((2.0, 3.0, 0.5), (0.002, 0.006, 0.004), (0.001, 0.002, 0.008))
    outcomes = [
        Outcome(toy(unused, Goal(2.5)), measured),
        Outcome(toy(unused, Goal(1)), measured),
        Outcome(toy(unused, Goal(1)), None, "no engine"),
    ]
    figures = [cells(outcome)[3:] for outcome in outcomes]
    assert figures[0] == ("4", "2", "2 x", "0.5 to 3", "≤ 2.5 x", "[green]held[/]")
    assert figures[1][-1] == "[yellow]missed[/]"
    assert figures[2][-1] == "[red]could not run[/]"
    assert table(outcomes).row_count == 3
    rows = json.loads(as_json(outcomes))["rows"]
    assert [row.get("held") for row in rows] == [True, False, None]
    assert rows[0]["values"] == [2.0, 3.0, 0.5]
    assert rows[2]["problem"] == "no engine"


def test_every_row_can_be_named() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(row.pairs >= 3 for row in ROWS)
