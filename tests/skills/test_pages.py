"""Listings page by page, also when skills come and go between the pages."""

import base64
from pathlib import Path

import pytest

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.search import Page, SkillMatch, find_page, list_page, sort_by_name
from mcp_sandbox.skills.skill import FrontMatter, Skill


def skill(name: str) -> Skill:
    uri = f"skill://here/{name}/SKILL.md"
    return Skill(uri, "here", Path("/skills") / name, FrontMatter(name, "", {}))


def names(page: Page) -> list[str]:
    return [each.skill.name for each in page.skills]


def test_pages_follow_each_other_without_gap() -> None:
    skills = [skill(f"s{n:02}") for n in range(25)]
    seen, cursor = list[str](), None
    while True:
        page = list_page(sort_by_name(skills[::-1]), cursor, 10)
        seen += names(page)
        assert page.total == 25
        if not page.more:
            break
        cursor = page.skills[-1].cursor
    assert seen == [each.name for each in skills]


def test_what_is_there_all_the_time_is_listed_once() -> None:
    skills = [skill(f"s{n}") for n in range(10)]
    first = list_page(sort_by_name(skills), None, 5)
    # The last one shown has gone, one came before it and one after.
    later = [each for each in skills if each.name != "s4"] + [skill("s1b"), skill("s7b")]
    second = list_page(sort_by_name(later), first.skills[-1].cursor, 50)
    assert names(second) == ["s5", "s6", "s7", "s7b", "s8", "s9"]
    assert not second.more


def test_the_best_come_first_and_a_change_between_pages_is_told() -> None:
    skills = [skill(f"s{n}") for n in range(4)]
    matches = [SkillMatch(each, float(n)) for n, each in enumerate(skills)]
    first = find_page(skills, matches, "words", None, 2)
    assert names(first) == ["s3", "s2"]
    cursor = first.skills[-1].cursor
    second = find_page(skills, matches, "words", cursor, 2)
    assert (names(second), second.more, second.notes) == (["s1", "s0"], False, ())
    assert find_page(skills[:3], matches[:3], "words", cursor, 2).notes[0].startswith("skills chan")


def made(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "é",
        "=" * 5000,
        made("[]"),
        made("{}"),
        made("1"),
        made("[0, 0, null, 1]"),
        made('[0, 0, 1.5, "u"]'),
        made('[9, 0, "a", "u"]'),
        made("[" * 2000),
        made('[0, 0, "a"]'),
    ],
)
def test_a_made_up_cursor_is_refused_with_what_to_do(cursor: str) -> None:
    with pytest.raises(InvalidArgument, match="leave it out"):
        list_page(sort_by_name([skill("a")]), cursor, 5)


def test_a_cursor_of_another_query_is_refused() -> None:
    match = SkillMatch(skill("a"), 1.0)
    cursor = find_page([match.skill], [match], "one", None, 1).skills[0].cursor
    with pytest.raises(InvalidArgument, match="another query"):
        find_page([match.skill], [match], "two", cursor, 1)
