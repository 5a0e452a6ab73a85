"""Finds skills for the users of one server, each among those that the user is offered."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.models import Skill
from mcp_sandbox.skills.outline import BEGINNING, headings
from mcp_sandbox.skills.pages import Page, best_first
from mcp_sandbox.skills.search import Index

Result = TypeVar("Result")

_MOST_USERS = 8
_MOST_MATCHES = 200
_AT_ONCE = 100


class Finder:
    """Keeps an index for each of the last users; what changed is read again before a search."""

    def __init__(self, library: Library) -> None:
        """Nothing is read before the first search."""
        self._library = library
        self._indexes: OrderedDict[str, Index] = OrderedDict()
        # Searches of one user wait for each other: not in the threads that all else needs.
        self._searching = CapacityLimiter(4)

    async def find(
        self, user: str, skills: Sequence[Skill], query: str, cursor: str | None, limit: int
    ) -> Page:
        """A page of those of the user's skills that the query fits, the best first.

        Raises:
            InvalidArgument: the cursor is not one of this listing.
        """
        index = self._index(user)
        outlines = await self._outlines(await self._run(partial(index.unknown, skills)))
        search = partial(index.search_among, skills, outlines, query, _MOST_MATCHES)
        found = await self._run(search)
        page = best_first(skills, found, query, cursor, limit)
        if not found:
            note = f"none of {len(skills):,} skills fits this: skills_list without query lists all"
            return replace(page, notes=(*page.notes, note))
        shown = [each.skill for each in page.skills]
        reasons = await self._run(partial(index.reasons, query, shown))
        explained = zip(page.skills, reasons, strict=True)
        return replace(page, skills=tuple(replace(each, reasons=why) for each, why in explained))

    def _index(self, user: str) -> Index:
        index = self._indexes.setdefault(user, Index())
        self._indexes.move_to_end(user)
        if len(self._indexes) > _MOST_USERS:
            self._indexes.popitem(last=False)
        return index

    async def _outlines(self, skills: Sequence[Skill]) -> Mapping[str, Sequence[str]]:
        """The headings of the texts; what cannot be read is still found by its name."""
        outlines: dict[str, Sequence[str]] = {}
        for begin in range(0, len(skills), _AT_ONCE):
            some = skills[begin : begin + _AT_ONCE]
            texts = await self._library.beginnings(some, BEGINNING)
            outlines.update(await self._run(partial(_headings, texts)))
        return outlines

    async def _run(self, look: Callable[[], Result]) -> Result:
        return await to_thread.run_sync(look, limiter=self._searching)


def _headings(texts: Mapping[str, bytes]) -> Mapping[str, Sequence[str]]:
    return {uri: headings(text) for uri, text in texts.items()}
