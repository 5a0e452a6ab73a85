"""Words on their way into the search: how a text is cut, what says nothing, what means the same."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

_MOST_TERMS = 16
_LONGEST_TERM = 40
# One letter makes another word of a shorter one: "two" is no mistyped "to".
_SHORTEST_MISTYPED = 5
# What comparing one term with all words may take; a step is a pair of letters.
_MOST_STEPS = 400_000
_WORD = re.compile(r"[^\W_]+")
# Scripts without spaces between words: every character counts as a word, a run as a phrase.
_UNSPACED = re.compile(r"([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")

_EMPTY_WORDS = """
a about after all also an and any are as at be been before but by can could did do does each every
few for from get give has have help how i if in into is it its just let like make many me more
most my need new not now of off on once one only or other our out over own per please should so some
such than that the their them then there these they this those three to too two up upon us use used
user using want was way we well why were what when where which while who will with would you your
"""
_EMPTY = frozenset(_EMPTY_WORDS.split())
# Groups of words by which people ask for the same thing. Each line is one group.
_SAME = """
spreadsheet excel xlsx xls csv workbook
slides powerpoint pptx presentation deck slideshow
document word docx letter
picture image photo png jpeg jpg illustration
chart plot graph diagram figure visualization visualisation
website web webpage html frontend
repository repo git github
bug error defect fault crash issue
test testing tests pytest unittest
translate translation localize localise localization i18n
summarize summarise summary digest
email mail inbox message
database sql sqlite postgres postgresql mysql query
deploy deployment release ship publish rollout
ci pipeline workflow actions
security vulnerability exploit audit hardening
performance speed slow latency profiling optimize optimise
container docker dockerfile podman
schedule calendar appointment meeting
music audio sound song
video film movie clip
money finance accounting invoice budget
cost costs bill billing spending pricing
secret secrets credential credentials password token key keys
machine-learning ml model training
draw drawing sketch art design
search find lookup retrieve
scrape scraping crawl crawler extract
review critique feedback inspect
write author compose draft
convert transform export
analyze analyse analysis statistics insight
form forms questionnaire survey
"""


def spaced(text: str) -> str:
    """The text with characters of unspaced scripts set apart."""
    return _UNSPACED.sub(r" \1 ", text)


def words(text: str) -> list[str]:
    """The words of a text in lower case, those of unspaced scripts as runs."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def terms(query: str) -> tuple[str, ...]:
    """What a query asks for: its distinct words, without those that say nothing."""
    found = dict.fromkeys(word[:_LONGEST_TERM] for word in words(query))
    telling = [word for word in found if word not in _EMPTY]
    return tuple((telling or [*found])[:_MOST_TERMS])


def _groups() -> Mapping[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for line in _SAME.strip().splitlines():
        group = line.split()
        for word in group:
            others = (*groups.get(word, ()), *(each for each in group if each != word))
            groups[word] = tuple(dict.fromkeys(others))
    return groups


SAME: Mapping[str, tuple[str, ...]] = _groups()
"""For a word, others by which people ask for the same thing."""


class Vocabulary:
    """All words that are known; finds those that a mistyped one may have meant."""

    def __init__(self, known: Iterable[str]) -> None:
        self._by_length: dict[int, list[tuple[str, int]]] = {}
        for word in sorted({word for word in known if len(word) >= _SHORTEST_MISTYPED} - _EMPTY):
            self._by_length.setdefault(len(word), []).append((word, _letters(word)))

    def near(self, term: str, most: int = 3) -> list[str]:
        """The known words within one typing mistake, or two of a long word; the nearest first.

        Of very many that are made of the same letters only the first are compared.
        """
        allowed = 0 if len(term) < _SHORTEST_MISTYPED else 1 if len(term) < 8 else 2
        alike = islice(self._alike(term, allowed), _MOST_STEPS // (len(term) + 1) ** 2)
        found = [
            (distance, word) for word in alike if 0 < (distance := edits(term, word)) <= allowed
        ]
        return [word for _, word in sorted(found)[:most]]

    def _alike(self, term: str, allowed: int) -> Iterator[str]:
        """The words of about that length and about these letters."""
        letters = _letters(term)
        for length in range(len(term) - allowed, len(term) + allowed + 1):
            for word, mask in self._by_length.get(length, ()):
                # One mistake changes which letters there are by two at the most.
                if (mask ^ letters).bit_count() <= 2 * allowed:
                    yield word


def _letters(word: str) -> int:
    mask = 0
    for letter in word:
        mask |= 1 << (ord(letter) & 63)
    return mask


def edits(one: str, other: str) -> int:
    """How many letters to insert, delete, replace or swap with their neighbour."""
    earlier: list[int] = []
    before: list[int] = []
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        earlier, before = before, row
        row = [at]
        for to, there in enumerate(other, 1):
            costs = [before[to] + 1, row[-1] + 1, before[to - 1] + (letter != there)]
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == there:
                costs.append(earlier[to - 2] + 1)
            row.append(min(costs))
    return row[-1]
