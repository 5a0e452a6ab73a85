"""Lists skills page by page. Pure.

A cursor holds the place of the last skill that was shown and not a number, so that a skill which
is there all the time is listed exactly once, whatever comes and goes meanwhile. The places of
matches shift when skills change: then the next page says so.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.models import Skill
from mcp_sandbox.skills.search import Match

_LONGEST_CURSOR = 4000
_LONGEST_URI = 300
_CHANGED = "skills changed since the page before: some matches may be missing or come twice"


@dataclass(frozen=True)
class Listed:
    """A skill of a page. `cursor` leads to what comes after it; `reasons` say why it matches."""

    skill: Skill
    cursor: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A part of a listing of `total`: `more` come after it. `notes` say what is not as expected."""

    skills: tuple[Listed, ...]
    more: bool
    total: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """Where a skill stands in a listing of that query, made of those skills.

    `uri` is shortened where it is long.
    """

    query: int
    skills: int
    rank: str | float
    uri: str

    def cursor(self) -> str:
        place = json.dumps([self.query, self.skills, self.rank, self.uri])
        return base64.urlsafe_b64encode(place.encode()).decode()


def all_by_name(skills: Sequence[Skill], cursor: str | None, limit: int) -> Page:
    """A page of all skills, by name.

    Raises:
        InvalidArgument: the cursor is not one of this listing.
    """
    placed = [(_Place(0, 0, _rank(skill), _short(skill.uri)), Match(skill)) for skill in skills]
    placed.sort(key=lambda each: (each[0].rank, each[0].uri))
    return _page(placed, cursor, 0, limit)


def best_first(
    skills: Sequence[Skill], matches: Sequence[Match], query: str, cursor: str | None, limit: int
) -> Page:
    """A page of what a query found among the skills.

    Raises:
        InvalidArgument: the cursor is not one of this listing.
    """
    asked = zlib.crc32(query.encode("utf-8", "replace")) or 1
    these = zlib.crc32("\n".join(skill.uri for skill in skills).encode("utf-8", "replace"))
    placed = [
        (_Place(asked, these, -match.score, _short(match.skill.uri)), match) for match in matches
    ]
    placed.sort(key=lambda each: (each[0].rank, each[0].uri))
    return _page(placed, cursor, asked, limit, these)


def _rank(skill: Skill) -> str:
    """By name; the one that the name means goes before others of the name."""
    return f"{skill.name.casefold()}\0{'hidden' if skill.shadowed_by else ''}"


def _short(uri: str) -> str:
    """The uri, or what stands for a long one: no skill's cursor is longer than callers may give."""
    if len(uri) <= _LONGEST_URI:
        return uri
    return uri[:_LONGEST_URI] + hashlib.sha256(uri.encode()).hexdigest()


def _page(
    placed: Sequence[tuple[_Place, Match]],
    cursor: str | None,
    query: int,
    limit: int,
    skills: int = 0,
) -> Page:
    begin, notes = 0, tuple[str, ...]()
    if cursor:
        last = _read(cursor, query)
        passed = (last.rank, last.uri)
        begin = sum((place.rank, place.uri) <= passed for place, _ in placed)
        notes = (_CHANGED,) if last.skills != skills else ()
    shown = placed[begin : begin + limit]
    listed = (Listed(match.skill, place.cursor()) for place, match in shown)
    return Page(tuple(listed), begin + limit < len(placed), len(placed), notes)


def _read(cursor: str, query: int) -> _Place:
    try:
        place = json.loads(base64.b64decode(cursor[:_LONGEST_CURSOR], b"-_", validate=True))
        asked, skills, rank, uri = place
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument(_unusable("is none of skills_list")) from None
    kind = float if query else str
    if asked != query or not isinstance(rank, kind) or not isinstance(uri, str):
        raise InvalidArgument(_unusable("belongs to another query"))
    return _Place(query, skills, rank, uri)


def _unusable(why: str) -> str:
    return f"this cursor {why}: leave it out to begin with the first page"
