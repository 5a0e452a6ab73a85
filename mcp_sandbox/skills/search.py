"""Finds skills by words, without a model: BM25 over what they say of themselves.

The name counts three times as much as the description and the tags, the headings of the text a
third. Words are compared by their stems; a word that nobody has is taken for a mistyped one.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from weakref import finalize

from mcp_sandbox.skills.models import Json, Skill
from mcp_sandbox.skills.words import SAME, Vocabulary, spaced, terms, words

_MOST_CHARS = {"description": 4000, "tags": 1000, "headings": 4000}
_TAGS = ("tags", "keywords", "category", "categories", "triggers", "aliases", "domain")
_GUESSED = 0.6
# The share of a query that a skill must have; of a long query, of so many words.
_LEAST, _LONG_QUERY = 0.29, 3
_SAME_NAME = 100.0
_MARKED = re.compile("\x02([^\x03]*)\x03")
_ALL_TEXT = (
    "SELECT name || ' ' || description || ' ' || tags FROM card "
    "UNION ALL SELECT headings FROM outline"
)


@dataclass(frozen=True)
class _Table:
    """A table of the index: how it is made and asked, and how much its matches count."""

    fields: tuple[str, ...]
    share: float
    make: str
    add: str
    drop: str
    known: str
    rank: str
    mark: str


# Headings have a table of their own: many of them must not make a skill's name count less.
_CARD = _Table(
    ("name", "description", "tags"),
    1.0,
    "CREATE VIRTUAL TABLE card USING fts5(name, description, tags, "
    "tokenize='porter unicode61 remove_diacritics 2')",
    "INSERT INTO card(rowid, name, description, tags) VALUES (?, ?, ?, ?)",
    "DELETE FROM card WHERE rowid = ?",
    "SELECT 1 FROM card WHERE card MATCH ? LIMIT 1",
    "SELECT rowid, bm25(card, 3.0, 1.0, 1.0) FROM card WHERE card MATCH ?",
    # All matches are gone through once; asked for one by one, each would do so again.
    "SELECT rowid, highlight(card, 0, char(2), char(3)), highlight(card, 1, char(2), char(3)), "
    "highlight(card, 2, char(2), char(3)) FROM card WHERE card MATCH ? "
    "AND +rowid IN (SELECT value FROM json_each(?))",
)
_OUTLINE = _Table(
    ("headings",),
    0.3,
    "CREATE VIRTUAL TABLE outline USING fts5(headings, "
    "tokenize='porter unicode61 remove_diacritics 2')",
    "INSERT INTO outline(rowid, headings) VALUES (?, ?)",
    "DELETE FROM outline WHERE rowid = ?",
    "SELECT 1 FROM outline WHERE outline MATCH ? LIMIT 1",
    "SELECT rowid, bm25(outline) FROM outline WHERE outline MATCH ?",
    "SELECT rowid, highlight(outline, 0, char(2), char(3)) FROM outline WHERE outline MATCH ? "
    "AND +rowid IN (SELECT value FROM json_each(?))",
)
_TABLES = (_CARD, _OUTLINE)


@dataclass(frozen=True)
class Match:
    """A skill that was found, and how well it fits."""

    skill: Skill
    score: float = 0.0


@dataclass(frozen=True)
class _Term:
    """A word of a query; `guesses` are words that it may stand for."""

    word: str
    guesses: tuple[str, ...] = ()

    def exact(self) -> str:
        return _phrase(self.word)

    def guessed(self) -> str:
        """With words that begin like it."""
        begun = [f"{_phrase(self.word)}*"] if len(self.word) > 2 else []
        return " OR ".join([*begun, *map(_phrase, self.guesses)])


class Index:
    """Skills of one catalogue, ready to be searched. Blocks; one caller at a time gets in."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._rows: dict[str, int] = {}
        self._skills: dict[int, Skill] = {}
        self._next = 1
        self._vocabulary: Vocabulary | None = None

    @cached_property
    def _database(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        finalize(self, database.close)
        for table in _TABLES:
            database.execute(table.make)
        return database

    def unknown(self, skills: Sequence[Skill]) -> list[Skill]:
        """Those that are not here, or are not as they are here."""
        with self._lock:
            known = {skill.uri: skill for skill in self._skills.values()}
        return [skill for skill in skills if known.get(skill.uri) is not skill]

    def update(self, skills: Sequence[Skill], outlines: Mapping[str, Sequence[str]]) -> None:
        """Hold exactly these; `outlines` has the headings, by uri, of those that were unknown."""
        with self._lock, self._database:
            wanted = {skill.uri: skill for skill in skills}
            here = [*self._rows.items()]
            for row in [row for uri, row in here if self._skills[row] is not wanted.get(uri)]:
                self._remove(row)
            for uri, skill in wanted.items():
                if uri not in self._rows:
                    self._add(skill, outlines.get(uri, ()))

    def _remove(self, row: int) -> None:
        for table in _TABLES:
            self._database.execute(table.drop, (row,))
        del self._rows[self._skills.pop(row).uri]
        self._vocabulary = None

    def _add(self, skill: Skill, outline: Sequence[str]) -> None:
        row, front = self._next, skill.front
        texts = {
            "name": front.name,
            "description": front.description,
            "tags": " ".join(_tags(skill)),
            "headings": "\n".join(outline),
        }
        for table in _TABLES:
            values = (_clipped(field, texts[field]) for field in table.fields)
            self._database.execute(table.add, (row, *values))
        self._rows[skill.uri] = row
        self._skills[row] = skill
        self._next += 1
        self._vocabulary = None

    def search_among(
        self,
        skills: Sequence[Skill],
        outlines: Mapping[str, Sequence[str]],
        query: str,
        most: int = 50,
    ) -> list[Match]:
        """Update and search, with nobody between: what others hold here is never found."""
        with self._lock:
            self.update(skills, outlines)
            return self.search(query, most)

    def search(self, query: str, most: int = 50) -> list[Match]:
        """The skills that fit best, at most so many; none for a query without words."""
        with self._lock:
            scores = self._scores(self._understood(query))
            for row in scores:
                if words(self._skills[row].name) == words(query):
                    scores[row] += _SAME_NAME
            best = sorted(scores, key=lambda row: (-scores[row], self._skills[row].uri))[:most]
            return [Match(self._skills[row], round(scores[row], 3)) for row in best]

    def reasons(self, query: str, skills: Sequence[Skill]) -> list[tuple[str, ...]]:
        """For each of the skills, which of its words fit the query, and where they stand."""
        with self._lock:
            asked = self._understood(query)
            forms = (form for term in asked for form in (term.exact(), term.guessed()))
            match = " OR ".join(filter(None, forms))
            rows = [self._rows.get(skill.uri, 0) for skill in skills]
            found: dict[int, list[str]] = {row: [] for row in rows}
            for table in _TABLES if match else ():
                values = (match, json.dumps(rows))
                for row, *marked in self._database.execute(table.mark, values):
                    found[row] += _hits(table.fields, marked, asked)
            return [tuple(found[row]) for row in rows]

    def _understood(self, query: str) -> list[_Term]:
        asked = terms(query)
        found: list[_Term] = []
        for word in asked:
            meant = (word,) if self._is_known(word) else (*self._near(word), word)
            guesses = (*meant, *(same for each in meant for same in SAME.get(each, ())))
            found.append(_Term(word, tuple(each for each in guesses if each not in asked)))
        return found

    def _is_known(self, term: str) -> bool:
        asked = (_phrase(term),)
        found = (self._database.execute(table.known, asked).fetchone() for table in _TABLES)
        return term in SAME or any(found)

    def _near(self, term: str) -> list[str]:
        if self._vocabulary is None:
            texts = self._database.execute(_ALL_TEXT)
            self._vocabulary = Vocabulary(
                {*SAME, *(word for (text,) in texts for word in words(text))}
            )
        return self._vocabulary.near(term)

    def _scores(self, asked: Sequence[_Term]) -> dict[int, float]:
        """How well the rows fit that have enough of the query; what most have tells little."""
        by_term = [self._scores_of(term) for term in asked]
        telling = [1 - max(len(found) - 1, 0) / max(len(self._rows), 1) for found in by_term]
        least = _LEAST * min(sum(telling), _LONG_QUERY)
        weighted = [*zip(by_term, telling, strict=True)]
        fits: dict[int, float] = {}
        for row in {row for found in by_term for row in found}:
            hits = [(*found[row], weight) for found, weight in weighted if row in found]
            if sum(form * weight for _, form, weight in hits) >= least:
                fits[row] = sum(hit[0] for hit in hits) * (1 + len(hits) / len(asked)) / 2
        return fits

    def _scores_of(self, term: _Term) -> dict[int, tuple[float, float]]:
        """The best that a form of the word, in any field, makes of each row, and of that word."""
        best: dict[int, tuple[float, float]] = {}
        for table in _TABLES:
            for match, weight in ((term.exact(), 1.0), (term.guessed(), _GUESSED)):
                for row, score in self._database.execute(table.rank, (match,)) if match else ():
                    known, form = best.get(row, (0.0, weight))
                    best[row] = max(known, -table.share * weight * score), max(form, weight)
        return best


def _hits(fields: Sequence[str], marked: Sequence[str], asked: Sequence[_Term]) -> Iterator[str]:
    for field, text in zip(fields, marked, strict=True):
        hits = dict.fromkeys(word.casefold() for word in _MARKED.findall(text))
        if hits:
            yield f"{field}: {', '.join(_told(word, asked) for word in [*hits][:5])}"


def _phrase(term: str) -> str:
    # Words hold letters and digits only, so that nothing of them is syntax within quotes.
    return f'"{spaced(term).strip()}"'


def _told(word: str, asked: Sequence[_Term]) -> str:
    """The word that was found, and what was asked for if one cannot see that from it."""
    plain = word.replace(" ", "")
    if any(term.word[:4] == plain[:4] for term in asked):
        return plain
    for term in asked:
        if any(guess[:5] == plain[:5] for guess in term.guesses):
            return f"{plain} (for {term.word})"
    return plain


def _clipped(field: str, text: str) -> str:
    return spaced(text[: _MOST_CHARS.get(field, 200)]).replace("\x02", " ").replace("\x03", " ")


def _tags(skill: Skill) -> list[str]:
    """What its author filed it under, in whichever shape."""
    fields = [skill.front.fields.get(name) for name in _TAGS]
    return [text for value in (*fields, dict(skill.front.metadata)) for text in _texts(value)]


def _texts(value: Json, depth: int = 3) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []
