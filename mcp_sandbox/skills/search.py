"""Finds skills by words, without a model, and lists them page by page.

A search ranks by BM25: the name counts three times as much as the description and the tags, the
headings of the text a third. SQLite compares words by their stems; a
word that no skill has counts as mistyped.

A cursor holds the place of the last skill that was shown and not a number, so that a skill which
is there all the time is listed exactly once, whatever comes and goes meanwhile. The places of
matches shift when skills change: then the next page says so.
"""

import base64
import hashlib
import json
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from threading import RLock
from weakref import finalize

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.catalogue import find_near_words, spaced, split_query, split_words
from mcp_sandbox.skills.skill import Json, Skill

_UNUSABLE = "this cursor {}: leave it out to begin with the first page"
_LONGEST_URI = 300
_CHANGED = "skills changed since the page before: some matches may be missing or come twice"
_TAGS = ("tags", "keywords", "category", "categories", "triggers", "aliases", "domain")
# The share of a query that a skill must have; of a long query, of so many words.
_LEAST, _LONG_QUERY = 0.29, 3
_MARKED = re.compile("\x02([^\x02\x03]*+)\x03")
_MAKE = (
    "CREATE VIRTUAL TABLE card USING fts5(name, description, tags, headings, "
    "tokenize='porter unicode61 remove_diacritics 2')"
)
_ADD = "INSERT INTO card(name, description, tags, headings) VALUES (?, ?, ?, ?)"
_KNOWN = "SELECT 1 FROM card WHERE card MATCH ? LIMIT 1"
_RANK = "SELECT rowid, bm25(card, 3.0, 1.0, 1.0, 0.3) FROM card WHERE card MATCH ?"
# One query for all rows: one for each row would go through all matches every time.
_MARK = (
    "SELECT rowid, highlight(card, 0, char(2), char(3)), highlight(card, 1, char(2), char(3)), "
    "highlight(card, 2, char(2), char(3)), highlight(card, 3, char(2), char(3)) FROM card "
    "WHERE card MATCH ? AND +rowid IN (SELECT value FROM json_each(?))"
)
_ALL_TEXT = "SELECT name || ' ' || description || ' ' || tags || ' ' || headings FROM card"


@dataclass(frozen=True)
class PageItem:
    """A skill of a page. `cursor` leads to what comes after it; `reasons` say why it matches."""

    skill: Skill
    cursor: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A part of a listing of `total`: `more` come after it. `notes` say what is not as expected."""

    skills: tuple[PageItem, ...]
    more: bool
    total: int
    notes: tuple[str, ...] = ()


# Where a skill stands in a listing: the query, the skills of which it was made, its rank there, and
# its uri, shortened where that is long.
_Place = tuple[int, int, str | float, str]
Placed = Sequence[tuple[_Place, Skill]]


@dataclass(frozen=True)
class SkillMatch:
    """A skill that was found, and how well it fits."""

    skill: Skill
    score: float = 0.0


@dataclass(frozen=True)
class _Term:
    """A word of a query; `guesses` are words that it may stand for."""

    word: str
    guesses: tuple[str, ...] = ()

    def forms(self) -> tuple[str, str]:
        """Return the search expressions for the word itself and for longer or similar words."""
        word = _phrase(self.word)
        begun = [f"{word}*"] if len(self.word) > 2 else []
        return word, " OR ".join([*begun, *map(_phrase, self.guesses)])


class Index:
    """Skills of one catalogue, ready to be searched. Blocks; one caller at a time gets in."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._rows: dict[str, int] = {}
        self._skills: dict[int, Skill] = {}
        self._vocabulary: list[str] | None = None

    @cached_property
    def _database(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        finalize(self, database.close)
        database.execute(_MAKE)
        return database

    def update(self, skills: Sequence[Skill]) -> None:
        """Index exactly these skills."""
        with self._lock, self._database:
            wanted = {skill.uri: skill for skill in skills}
            for row, skill in [*self._skills.items()]:
                if wanted.get(skill.uri) is not skill:
                    self._database.execute("DELETE FROM card WHERE rowid = ?", (row,))
                    del self._rows[self._skills.pop(row).uri]
                    self._vocabulary = None
            for uri, skill in wanted.items():
                if uri not in self._rows:
                    self._add(skill)

    def _add(self, skill: Skill) -> None:
        front = skill.front
        filed = (*(front.fields.get(name) for name in _TAGS), dict(front.metadata))
        tags = " ".join(text for value in filed for text in _texts(value))
        texts = (front.name, front.description, tags, skill.outline)
        clipped = tuple(map(_clipped, texts, (200, 4000, 1000, 4000)))
        row = self._database.execute(_ADD, clipped).lastrowid or 0
        self._rows[skill.uri], self._skills[row] = row, skill
        self._vocabulary = None

    def search_among(self, skills: Sequence[Skill], query: str, most: int = 50) -> list[SkillMatch]:
        """Update and search under one lock, so that only the given skills can be found."""
        with self._lock:
            self.update(skills)
            return self.search(query, most)

    def search(self, query: str, most: int = 50) -> list[SkillMatch]:
        """Return the best matching skills, at most `most`; none for a query without words."""
        with self._lock:
            scores = self._scores(self._understood(query))
            for row in scores:
                if split_words(self._skills[row].name) == split_words(query):
                    scores[row] += 100.0
            best = sorted(scores, key=lambda row: (-scores[row], self._skills[row].uri))[:most]
            return [SkillMatch(self._skills[row], round(scores[row], 3)) for row in best]

    def reasons(self, query: str, skills: Sequence[Skill]) -> list[tuple[str, ...]]:
        """Return for each skill which of its words match the query, and in which fields."""
        with self._lock:
            asked = self._understood(query)
            match = " OR ".join(form for term in asked for form in term.forms() if form)
            rows = [self._rows.get(skill.uri, 0) for skill in skills]
            found: dict[int, list[str]] = {row: [] for row in rows}
            marks = self._database.execute(_MARK, (match, json.dumps(rows))) if match else ()
            for row, *marked in marks:
                found[row] += _hits(marked, asked)
            return [tuple(found[row]) for row in rows]

    def _understood(self, query: str) -> list[_Term]:
        asked = split_query(query)
        found: list[_Term] = []
        for word in asked:
            known = self._database.execute(_KNOWN, (_phrase(word),)).fetchone() is not None
            guesses = () if known else self._near(word)
            found.append(_Term(word, tuple(each for each in guesses if each not in asked)))
        return found

    def _near(self, term: str) -> list[str]:
        if self._vocabulary is None:
            texts = self._database.execute(_ALL_TEXT)
            self._vocabulary = sorted({word for (text,) in texts for word in split_words(text)})
        return find_near_words(term, self._vocabulary)

    def _scores(self, asked: Sequence[_Term]) -> dict[int, float]:
        """Score the rows that match enough of the query; words that most rows have count little."""
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
        best: dict[int, tuple[float, float]] = {}
        for match, weight in zip(term.forms(), (1.0, 0.6), strict=True):
            for row, score in self._database.execute(_RANK, (match,)) if match else ():
                known, form = best.get(row, (0.0, weight))
                best[row] = max(known, -weight * score), max(form, weight)
        return best


class SkillSearch:
    """Keeps an index for each of the last users."""

    def __init__(self) -> None:
        self._index_of = lru_cache(8)(lambda _user: Index())
        # Searches of one user wait for each other, so they get threads of their own.
        self._searching = CapacityLimiter(4)

    async def find(
        self, user: str, skills: Sequence[Skill], query: str, cursor: str | None, limit: int
    ) -> Page:
        """Return a page of the user's skills that match the query, the best first.

        Raises InvalidArgument: the cursor is not one of this listing.
        """
        index = self._index_of(user)
        search = partial(index.search_among, skills, query, 200)
        found = await to_thread.run_sync(search, limiter=self._searching)
        page = find_page(skills, found, query, cursor, limit)
        if not found:
            note = f"none of {len(skills):,} skills fits this: skills_list without query lists all"
            return replace(page, notes=(*page.notes, note))
        listed = [each.skill for each in page.skills]
        reasons = await to_thread.run_sync(index.reasons, query, listed, limiter=self._searching)
        explained = zip(page.skills, reasons, strict=True)
        return replace(page, skills=tuple(replace(each, reasons=why) for each, why in explained))


def sort_by_name(skills: Iterable[Skill]) -> Placed:
    """Return all skills, sorted by name."""
    ranks = {True: "\0hidden", False: "\0"}
    placed = [
        ((0, 0, each.name.casefold() + ranks[bool(each.shadowed_by)], _short(each.uri)), each)
        for each in skills
    ]
    return sorted(placed, key=itemgetter(0))


def find_page(
    skills: Sequence[Skill],
    matches: Sequence[SkillMatch],
    query: str,
    cursor: str | None,
    limit: int,
) -> Page:
    """Return a page of the skills that a query found; raises InvalidArgument as `list_page`."""
    asked = zlib.crc32(query.encode("utf-8", "replace")) or 1
    these = zlib.crc32("\n".join(skill.uri for skill in skills).encode("utf-8", "replace"))
    placed = [
        ((asked, these, -match.score, _short(match.skill.uri)), match.skill) for match in matches
    ]
    return list_page(sorted(placed, key=itemgetter(0)), cursor, limit, asked, these)


def _short(uri: str) -> str:
    """Return the uri, shortened by a digest if it is long, as callers pass it in a cursor."""
    if len(uri) <= _LONGEST_URI:
        return uri
    return uri[:_LONGEST_URI] + hashlib.sha256(uri.encode()).hexdigest()


def list_page(
    placed: Placed, cursor: str | None, limit: int, query: int = 0, skills: int = 0
) -> Page:
    """Return a page of all skills, sorted as by `sort_by_name`, or of the results of a query.

    Raises InvalidArgument: the cursor is not one of this listing.
    """
    begin, notes = 0, tuple[str, ...]()
    if cursor:
        last, before = _read(cursor, query)
        begin = sum(place[2:] <= last for place, _ in placed)
        notes = (_CHANGED,) if before != skills else ()
    listed = (PageItem(skill, _cursor(place)) for place, skill in placed[begin : begin + limit])
    return Page(tuple(listed), begin + limit < len(placed), len(placed), notes)


def _cursor(place: _Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _read(cursor: str, query: int) -> tuple[tuple[str | float, str], object]:
    """Return the position that a cursor names, and a checksum of the skills it was made for."""
    try:
        asked, skills, rank, uri = json.loads(base64.b64decode(cursor[:4000], b"-_", validate=True))
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument(_UNUSABLE.format("is none of skills_list")) from None
    kind = float if query else str
    if asked != query or not isinstance(rank, kind) or not isinstance(uri, str):
        raise InvalidArgument(_UNUSABLE.format("belongs to another query"))
    return (rank, uri), skills


def _hits(marked: Sequence[str], asked: Sequence[_Term]) -> Iterator[str]:
    for field, text in zip(("name", "description", "tags", "headings"), marked, strict=True):
        if hits := dict.fromkeys(word.casefold() for word in _MARKED.findall(text)):
            yield f"{field}: {', '.join(_told(word, asked) for word in [*hits][:5])}"


def _phrase(term: str) -> str:
    # Words have only letters and digits, so nothing in them can end the quotes.
    return f'"{spaced(term).strip()}"'


def _told(word: str, asked: Sequence[_Term]) -> str:
    """Return the word that was found, with the word of the query if that is not evident."""
    plain = word.replace(" ", "")
    meant = [term.word for term in asked if any(each[:5] == plain[:5] for each in term.guesses)]
    is_plain = not meant or any(term.word[:4] == plain[:4] for term in asked)
    return plain if is_plain else f"{plain} (for {meant[0]})"


def _clipped(text: str, most: int) -> str:
    text = text[:most].replace("\x02", " ").replace("\x03", " ")
    # Repeated words add nothing, but characters of unspaced scripts form words by their order.
    return spaced(" ".join(dict.fromkeys(text.split())))


def _texts(value: Json, depth: int = 3) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each, depth - 1)] if depth else []
