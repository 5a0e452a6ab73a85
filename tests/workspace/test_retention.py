"""What is due is decided by ages that no jump of a clock can change."""

from collections.abc import Mapping
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.config.values import DAY_S
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.retention import (
    WATCHED_S,
    Age,
    Ages,
    DueChat,
    Moment,
    in_words,
    is_time,
    list_due_chats,
    list_outdated,
)

NOON = 1_700_000_000.0
BOOT = 5_000.0
START = Moment(NOON, BOOT)
WEEK_S = 7 * DAY_S
YEAR_S = 365 * DAY_S
OLD, NEW, BARE = ChatId("u", "old"), ChatId("u", "new"), ChatId("u", "bare")


def later(seconds: float, *, jump: float = 0) -> Moment:
    """So long after the start, with the wall clock moved by `jump`."""
    return Moment(NOON + seconds + jump, BOOT + seconds)


def gone(ages: Mapping[ChatId, Age], **more: float) -> list[ChatId]:
    return [one.chat for one in list_due_chats(ages, keep_s=WEEK_S, **more)]  # type: ignore[arg-type]


def watched(
    stamps: Mapping[ChatId, float | None], *moments: Moment, anchor: Moment = START
) -> Mapping[ChatId, Age]:
    """Ages at the last of the moments."""
    ages = Ages[ChatId](anchor)
    for moment in moments:
        found = ages.look(stamps, moment)
    return found


def test_what_nobody_used_for_the_time_is_due_once_it_was_watched() -> None:
    stamps = {OLD: NOON - WEEK_S, NEW: NOON - WEEK_S + 3600}
    assert gone(watched(stamps, START)) == []
    assert gone(watched(stamps, START, later(WATCHED_S - 1))) == []
    assert gone(watched(stamps, START, later(WATCHED_S))) == [OLD]
    assert gone(watched(stamps, START, later(3600))) == [OLD, NEW]


def test_a_person_who_asks_need_not_wait() -> None:
    assert gone(watched({OLD: NOON - WEEK_S}, START), watched_s=0) == [OLD]


def test_the_reason_says_how_long_and_which_setting() -> None:
    (found,) = list_due_chats(watched({OLD: NOON - 9 * DAY_S}, START), keep_s=WEEK_S, watched_s=0)
    assert found == DueChat(OLD, "not used for 9 days; kept for 7 days (workspace.retention)")


def test_nothing_is_due_without_a_retention() -> None:
    ages = watched({OLD: 0.0}, START, later(YEAR_S))
    assert list_due_chats(ages, keep_s=0) == []


def test_what_is_in_use_is_never_due() -> None:
    ages = watched({OLD: 0.0, NEW: 0.0}, START, later(DAY_S))
    assert [one.chat for one in list_due_chats(ages, keep_s=WEEK_S, in_use={OLD})] == [NEW]


def test_a_jump_forwards_makes_nothing_due() -> None:
    stamps = {OLD: NOON - 60, BARE: None}
    ages = watched(stamps, START, later(WATCHED_S, jump=YEAR_S), later(DAY_S, jump=YEAR_S))
    assert gone(ages) == []
    assert ages[OLD].idle_s == DAY_S + 60


def test_a_chat_first_seen_after_a_jump_is_not_due() -> None:
    ages = Ages[ChatId](START)
    ages.look({}, START)
    jumped = later(60, jump=YEAR_S)
    ages.look({NEW: NOON}, jumped)
    assert gone(ages.look({NEW: NOON}, later(DAY_S, jump=YEAR_S))) == []


def test_a_chat_used_under_a_wrong_clock_is_not_due_under_the_right_one() -> None:
    behind = NOON - YEAR_S
    ages = Ages[ChatId](Moment(behind, BOOT))
    ages.look({OLD: behind - DAY_S}, Moment(behind, BOOT))
    ages.look({OLD: behind + 50}, Moment(behind + 60, BOOT + 60))
    right = Moment(NOON + 2 * DAY_S, BOOT + 2 * DAY_S)
    assert gone(ages.look({OLD: behind + 50}, right)) == []
    assert ages.look({OLD: behind + 50}, right)[OLD].idle_s < 2 * DAY_S + 61


def test_a_clock_that_was_ahead_at_first_and_is_put_right_makes_younger() -> None:
    ahead = Moment(NOON + YEAR_S, BOOT)
    ages = watched({OLD: NOON - DAY_S}, ahead, later(DAY_S), anchor=ahead)
    assert ages[OLD].idle_s == 2 * DAY_S
    assert gone(ages) == []


def test_a_jump_backwards_makes_nothing_due_and_the_future_counts_as_now() -> None:
    ages = watched({OLD: NOON + YEAR_S}, START, later(6 * DAY_S, jump=-YEAR_S))
    assert ages[OLD].idle_s == 0
    assert gone(ages) == []


def test_an_unknown_time_of_use_counts_from_the_first_look() -> None:
    assert gone(watched({BARE: None}, START, later(WEEK_S - 1))) == []
    assert gone(watched({BARE: None}, START, later(WEEK_S))) == [BARE]


def test_use_is_noticed_by_a_change_of_the_stamp_whatever_it_says() -> None:
    ages = Ages[ChatId](START)
    ages.look({OLD: NOON - YEAR_S}, START)
    found = ages.look({OLD: NOON - 2 * YEAR_S}, later(3600))
    assert found[OLD] == Age(idle_s=3600, watched_s=0)
    ages.look({}, later(3601))
    assert ages.look({OLD: NOON - YEAR_S}, later(3602))[OLD].idle_s == pytest.approx(YEAR_S + 3602)


@given(
    jumps=st.lists(st.floats(-10 * YEAR_S, 10 * YEAR_S), min_size=1, max_size=8),
    steps=st.lists(st.floats(0, DAY_S), min_size=8, max_size=8),
    age=st.floats(0, YEAR_S),
)
def test_whatever_the_wall_clock_does_nothing_ages_faster_than_time(
    jumps: list[float], steps: list[float], age: float
) -> None:
    ages = Ages[ChatId](START)
    passed = 0.0
    ages.look({OLD: NOON - age}, START)
    for jump, step in zip(jumps, steps, strict=False):
        passed += step
        found = ages.look({OLD: NOON - age, NEW: NOON}, later(passed, jump=jump))
        assert found[OLD].idle_s <= age + passed + 1
        assert found[NEW].idle_s <= passed + 1


def test_the_longest_unused_goes_first() -> None:
    ages = {"a": Age(5, 0), "b": Age(9, 0), "c": Age(1, 0), "d": Age(9, 0)}
    assert list_outdated(ages, 5, watched_s=0) == ["b", "d", "a"]


@pytest.mark.parametrize(
    ("last", "now", "expected"),
    [
        ("2026-01-01T02:00", "2026-01-01T02:59", False),
        ("2026-01-01T02:59", "2026-01-01T03:00", True),
        ("2026-01-01T03:00", "2026-01-01T03:00", False),
        ("2026-01-01T03:00", "2026-01-02T02:59", False),
        ("2026-01-01T03:00", "2026-01-09T12:00", True),
        ("2026-01-09T03:00", "2026-01-01T03:00", False),
        # The hour that is left out in spring.
        ("2026-03-29T01:59", "2026-03-29T03:01", True),
    ],
)
def test_a_schedule_has_its_turn_once(last: str, now: str, expected: bool) -> None:
    moments = datetime.fromisoformat(last), datetime.fromisoformat(now)
    assert is_time("0 3 * * *", *moments) is expected


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "5 s"), (60, "1 minute"), (7199, "1 hour"), (7200, "2 hours"), (86400, "1 day")],
)
def test_times_are_told_in_their_largest_unit(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
