"""Finding skills by words."""

import random
import string
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.skills.catalogue import find_near_words
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.search import Index
from mcp_sandbox.skills.skill import FrontMatter, Skill

# What a skill is, how its author describes it, and how people ask for it in other words.
KNOWN = {
    "pdf-forms": (
        "Fill in and extract fields of PDF documents.",
        ("complete a questionnaire in pdf", "extracting the fields of a pdf", "fomrs in a pdf"),
    ),
    "workbook-editor": (
        "Reads and edits Excel workbooks, keeping formulas.",
        ("change a cell in my spreadsheet", "an xlsx with formulas", "spredsheet formulas"),
    ),
    "deck-writer": (
        "Builds presentations with speaker notes.",
        ("make slides for my talk", "powerpoint with notes", "presentaton"),
    ),
    "git-archaeology": (
        "Finds the commit that brought a defect, by bisecting.",
        ("which commit introduced this bug", "bisect the repository", "git bisection"),
    ),
    "log-triage": (
        "Groups the lines of server logs by incident and finds the first cause.",
        (
            "why did the server crash, see its logs",
            "root cause of an incident",
            "grouping log lines",
        ),
    ),
    "numeral-cuneiform": (
        "Transcribes Babylonian sexagesimal tablets.",
        ("babylonian tablet", "transcribe cuneiform", "sexagesimal"),
    ),
    "invoice-check": (
        "Compares invoices with purchase orders and lists what differs.",
        ("does this bill match the purchase order", "check an invoice", "invoise differences"),
    ),
    "site-preview": (
        "Serves a web page and takes pictures of it.",
        ("screenshot my website", "look at the frontend in a browser page", "serve html"),
    ),
    "translate-catalogue": (
        "Translates message catalogues (gettext po files) and keeps placeholders.",
        ("localize the po files", "i18n of messages", "gettext"),
    ),
    "query-tuning": (
        "Explains slow Postgres queries and proposes indexes.",
        ("sql is slow", "which index would help my database", "speed up postgres"),
    ),
}
SYLLABLES = [
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "ka",
    "le",
    "mi",
    "no",
    "pu",
    "ra",
    "se",
    "ti",
    "vo",
    "zu",
]


def skill(name: str, description: str = "", **fields: str) -> Skill:
    front = FrontMatter(name, description, {"name": name, "description": description, **fields})
    return Skill(f"skill://here/{name}/SKILL.md", "here", Path("/skills") / name, front)


def crowd(number: int) -> Iterator[Skill]:
    """Skills about nothing, in words of which a fifth are those of the known skills."""
    pick = random.Random(7)
    known = " ".join(said for said, _ in KNOWN.values()).lower().replace(".", "").split()
    for count in range(number):
        made = ["".join(pick.choices(SYLLABLES, k=3)) for _ in range(20)]
        text = " ".join(pick.choices(made, k=16) + pick.choices(known, k=4))
        yield skill(f"{made[0]}-{made[1]}-{count}", text)


@pytest.fixture(scope="module")
def five_thousand() -> Index:
    index = Index()
    known = [skill(name, said) for name, (said, _) in KNOWN.items()]
    index.update([*crowd(5000 - len(known)), *known])
    return index


def found(index: Index, query: str, most: int = 5) -> list[str]:
    return [match.skill.name for match in index.search(query, most)]


def test_skills_are_found_by_other_words_among_five_thousand(five_thousand: Index) -> None:
    asked = [(name, query) for name, (_, queries) in KNOWN.items() for query in queries]
    missed = [(name, query) for name, query in asked if name not in found(five_thousand, query)]
    recall = 1 - len(missed) / len(asked)
    assert recall >= 0.9, (recall, missed)


def test_a_query_among_five_thousand_takes_no_time(five_thousand: Index) -> None:
    found(five_thousand, "mistypd wordz once so that the words are known")
    queries = [query for _, queries in KNOWN.values() for query in queries]
    started = time.perf_counter()
    for query in queries:
        five_thousand.search(query, 50)
    mean_ms = (time.perf_counter() - started) / len(queries) * 1000
    assert mean_ms < 50


def test_a_name_counts_more_than_what_others_say() -> None:
    index = Index()
    talk = [skill(f"other-{n}", "Works well with docker and docker and docker.") for n in range(5)]
    index.update([*talk, skill("docker", "Builds images.")])
    assert found(index, "docker")[0] == "docker"


def test_tags_and_headings_are_searched() -> None:
    index = Index()
    tagged = skill("one", "Something.", tags="astronomy, telescopes")
    titled = replace(skill("two", "Something else."), outline="Calibrating a spectrograph")
    index.update([tagged, titled])
    assert found(index, "telescope") == ["one"]
    assert found(index, "spectrographs") == ["two"]
    assert index.reasons("spectrographs", [tagged, titled]) == [(), ("headings: spectrograph",)]


def test_every_match_says_why() -> None:
    index = Index()
    forms = skill("pdf-forms", "Fills forms.")
    index.update([forms])
    (reasons,) = index.reasons("fill in pdf fomrs", [forms])
    assert reasons == ("name: pdf, forms (for fomrs)", "description: fills, forms (for fomrs)")


SHIPPED = {
    "code-review": (
        "critique my code",
        "give feedback on a pr",
        "revviw my changes",
        "security audit of the project folder",
    ),
    "python-data-analysis": (
        "analyze sales data",
        "clean missing values in a spreadsheet",
        "explore dataset columns",
        "pandas is not installed",
        "someone uploaded a csv and wants mean revenue per region drawn as a bar chart",
    ),
    "skill-authoring": ("improve the description of my skill", "create a new skill"),
    "using-this-sandbox": (
        "command killed out of memory",
        "no network, pip install fails",
        "timeout of a long running command",
        "which files stay after restart",
    ),
    "web-page-preview": ("dashboard of sales", "preview my website", "find html mistakes"),
}
FOR_NONE = (
    "book a meeting",
    "convert mp4 to gif",
    "encrypt a file with gpg",
    "fill in a pdf form",
    "git rebase onto main",
    "merge two pdf files",
    "ocr a scanned receipt",
    "recipe for bread",
    "regex to match dates",
    "train a neural network",
    "transcribe audio",
    "translate text to french",
    "two",
)


def shipped() -> Index:
    index = Index()
    known = anyio.run(SkillLibrary(SkillsConfig(), Path("/nowhere")).catalogue, "tester").skills
    index.update(known)
    return index


@pytest.mark.parametrize(("name", "queries"), SHIPPED.items())
def test_a_task_finds_the_shipped_skill_that_is_for_it(name: str, queries: tuple[str, ...]) -> None:
    index = shipped()
    assert [(query, found(index, query, 1)) for query in queries] == [
        (query, [name]) for query in queries
    ]


def test_a_task_that_no_shipped_skill_is_for_finds_none() -> None:
    index = shipped()
    assert [(query, found(index, query)) for query in FOR_NONE] == [(q, []) for q in FOR_NONE]


def test_a_word_that_all_skills_have_finds_them_if_it_is_all_that_is_asked_for() -> None:
    index = Index()
    index.update([skill("pdf-forms"), skill("pdf-pages"), skill("pdf-text")])
    assert len(found(index, "pdf")) == 3
    assert found(index, "forms of a pdf")[0] == "pdf-forms"


def test_short_and_empty_words_are_no_mistyped_ones() -> None:
    known = ["to", "form", "audit", "there", "slides"]
    assert [
        find_near_words(word, known) for word in ("two", "from", "three", "sldies", "aduit")
    ] == [
        [],
        [],
        [],
        ["slides"],
        ["audit"],
    ]


@pytest.mark.parametrize(
    ("asked", "name"),
    [("数据分析", "shuju"), ("グラフ", "gurafu"), ("résumé", "cv"), ("RESUME", "cv")],
)
def test_other_scripts_are_searched(asked: str, name: str) -> None:
    index = Index()
    index.update(
        [
            skill("shuju", "用于数据分析和报告"),
            skill("gurafu", "グラフを描く"),
            skill("cv", "Writes a résumé."),
        ]
    )
    assert found(index, asked) == [name]


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "a AND",
        "name:x",
        "NEAR(a b)",
        "x*",
        "^y",
        "(",
        "\x00",
        "- -",
        "'; DROP TABLE card",
        " ",
    ],
)
def test_no_query_is_syntax(query: str) -> None:
    index = Index()
    index.update([skill("drop-table", "Drops a table, near a name.")])
    for match in index.search(query):
        assert match.skill.name == "drop-table"
    assert found(index, "table") == ["drop-table"]


@given(st.text(max_size=40), st.text(max_size=60))
def test_any_text_can_be_searched_for_any_other(text: str, query: str) -> None:
    index = Index()
    one = replace(skill("one", text), outline=query)
    index.update([one])
    index.search(text)
    index.search(query)
    index.reasons(query, [one])


def test_what_changed_is_found_as_it_is_now() -> None:
    index = Index()
    one, two = skill("one", "First."), skill("two", "Second.")
    index.update([one, two])
    newer = skill("two", "Newest.")
    index.update([newer])
    assert (found(index, "first"), found(index, "second"), found(index, "newest")) == (
        [],
        [],
        ["two"],
    )


def test_words_made_of_the_same_letters_hold_up_no_search() -> None:
    letters = string.ascii_lowercase + string.ascii_lowercase[:14]
    chance = random.Random(1)
    alike = ["".join(chance.sample(letters, 40)) for _ in range(20_000)]
    asked = [word[::-1] for word in alike[:9]]
    known = sorted([*alike, f"{asked[0][:20]}{asked[0][21:]}"])
    began = time.thread_time()
    assert find_near_words(asked[0], known) == [f"{asked[0][:20]}{asked[0][21:]}"]
    assert all(not find_near_words(word, known) for word in asked[1:])
    assert time.thread_time() - began < 5
