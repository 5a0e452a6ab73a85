"""Whatever the code is, it gets a level, soon."""

import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_sandbox.policy import assess
from mcp_sandbox.policy.rules import LEVELS

PARTS = {
    "bash": "rm -rf / ~ $HOME $( ) ` ' \" \\ \n ; | & && || > >> < << <<< E <( { } ( (( )) [[ ]] "
    "case in esac for do done if then fi f() coproc $' ${ } $x x= a=( # eval sudo sh -c curl",
    "python": "import os from as * ( ) [ ] { } . , : ; \n ' \" ''' f\" \\ # eval exec open getattr "
    "def class lambda = == \t subprocess .run 'w' { } @ async match",
    "javascript": "eval ( ) [ ] { } . ; , : \n ' \" ` ${ } // /* */ / \\ require import from "
    "child_process 'fs' => = ? new Function exec",
    "browser": "password credit pay \n \0 ( )",
}
UNITS = {
    "bash": ["$(", "a=(", "{ ", "`", "$'", '"$', "<<E ", "rm x;", "f(){ ", "a=$a$a;", "sudo ", "((",
             "x|", "case x in ", "coproc ", "\\", "eval '", "echo $(echo "],
    "python": ["(", '"""', "f'{", "import os;", "x.", "a=a.b;", "os.system(", "getattr(", "\\\n",
               "eval('", "from a import b\n", "print(x)\n"],
    "javascript": ["(", "`${", "require(", "x.", "eval;", "/*", "//", "'", "[/", "/a", "{a:"],
}  # fmt: skip


def texts(language: str) -> st.SearchStrategy[str]:
    parts = st.sampled_from(PARTS[language].split(" "))
    joined = st.lists(st.one_of(parts, st.text(max_size=4)), max_size=40)
    anything = st.text(st.characters(), max_size=200)
    return st.one_of(joined.map(" ".join), joined.map("".join), anything)


def fuzzed(language: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts(language))
    def has_a_level(code: str) -> None:
        assert assess(code, language).level in LEVELS

    has_a_level()


@pytest.mark.parametrize("language", list(PARTS))
def test_any_text_has_a_level(language: str) -> None:
    fuzzed(language, 150)


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", list(PARTS))
def test_thousands_of_texts_have_a_level(language: str) -> None:
    fuzzed(language, 5_000)


def seconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(2):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return min(taken)


def is_linear(language: str, unit: str, size: int, most_s: float) -> bool:
    """Whether all of a text takes hardly more than twice as long as half of it, once in three."""
    text = (unit * size)[:size]
    for _ in range(3):
        half = seconds(lambda: assess(text[: size // 2], language))
        whole = seconds(lambda: assess(text, language))
        if whole <= min(most_s, 2.5 * half + 0.01):
            return True
    return False


REPEATED = [(language, unit) for language, units in UNITS.items() for unit in units]


@pytest.mark.alone
@pytest.mark.parametrize(("language", "unit"), REPEATED)
def test_twice_the_text_takes_hardly_more_than_twice_as_long(language: str, unit: str) -> None:
    assert is_linear(language, unit, 8_192, 0.25)


@pytest.mark.alone
@pytest.mark.whole
@pytest.mark.parametrize(("language", "unit"), REPEATED)
def test_all_that_is_read_is_graded_in_a_quarter_of_a_second(language: str, unit: str) -> None:
    assert is_linear(language, unit, 65_536, 0.25)


# Texts that a careless expression of a rule tries in endlessly many ways.
ENDLESS = [
    ("bash", "rm -rf /", "{}", "x"),
    ("bash", "rm -rf /{*", ",", "x"),
    ("bash", "rm -rf /home/", "*", "/x"),
    ("bash", "rm -", "r", ": /"),
    ("python", "open('f', '", "+", "!')"),
    ("python", "p.open('", "+", "!')"),
]


@pytest.mark.parametrize(("language", "head", "unit", "tail"), ENDLESS)
def test_no_rule_is_tried_in_endlessly_many_ways(
    language: str, head: str, unit: str, tail: str
) -> None:
    for count in (28, 60_000):
        code = head + (unit * count)[:60_000] + tail
        assert seconds(partial(assess, code, language)) < 0.5


@pytest.mark.parametrize("code", ["\ud800rm", "ls\0rm", "\ufeffls", "ls\r\nrm x\r\n", "(" * 50_000])
def test_odd_characters_are_no_error(code: str) -> None:
    assert all(assess(code, language).level in LEVELS for language in PARTS)
