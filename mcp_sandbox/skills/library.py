"""All skills that there are: the way into this room."""

import difflib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.skills.catalogue import Catalogue, merge
from mcp_sandbox.skills.contents import Gathered, gather, is_utf8
from mcp_sandbox.skills.files import read_beginning, read_whole
from mcp_sandbox.skills.junk import is_junk
from mcp_sandbox.skills.models import Change, Contents, Skill
from mcp_sandbox.skills.roots import Whose, is_trusted, opened, shared_roots
from mcp_sandbox.skills.shelves import Shelves
from mcp_sandbox.skills.uris import DOCUMENT
from mcp_sandbox.skills.watch import Pace, watched

_MERGED = 32
_GATHERED_FILES = 20_000


class Library:
    """The skills of all roots, for any chat. What it knows is looked up again at every call."""

    def __init__(self, settings: SkillsConfig, data_dir: Path, *, pace: Pace | None = None) -> None:
        """Nothing is read yet. `pace` is how changes are looked for."""
        self._pace = pace or Pace()
        self._settings = settings
        self._data_dir = data_dir
        self._shelves = Shelves(settings, data_dir)
        self._merged: OrderedDict[tuple[int, ...], tuple[list[Catalogue], Catalogue]] = (
            OrderedDict()
        )
        self._gathered: OrderedDict[Path, Gathered] = OrderedDict()
        self._gathered_files = 0
        self._looking = CapacityLimiter(4)
        self._reading = CapacityLimiter(4)

    async def catalogue(self, whose: Whose, *, max_age_s: float = 0.0) -> Catalogue:
        """What is offered to a chat or user, as the folders are now or were `max_age_s` ago.

        It is the same object as before as long as nothing changed.

        Raises:
            InvalidArgument: no user can have that id.
        """
        since = time.monotonic() - max_age_s
        parts = await to_thread.run_sync(self._shelves.look, whose, since, limiter=self._looking)
        return self._merge([part for part in parts if part.skills or part.problems])

    def changes(self, whose: Whose) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """What changes in that catalogue while the context lasts, one for each burst of edits."""
        return watched(lambda age_s: self.catalogue(whose, max_age_s=age_s), self._pace)

    async def contents(self, skill: Skill) -> Contents:
        """All files of a skill; only those that changed since the last call are read.

        Raises:
            UnknownSkill: it is gone.
            Busy: a file of it is being written all the time.
            TooLarge: its document has more than 16 MiB.
        """
        # As in `sweep`: what is known is compared by a stat, which is not for untrusted folders.
        known = self._gathered.get(skill.folder) if is_trusted(skill) else None
        gathered = await to_thread.run_sync(self._gather, skill, known, limiter=self._reading)
        before = self._gathered.get(skill.folder)
        self._gathered[skill.folder] = gathered
        self._gathered.move_to_end(skill.folder)
        self._gathered_files += len(gathered.kept) - (len(before.kept) if before else 0)
        while self._gathered_files > _GATHERED_FILES:
            _, oldest = self._gathered.popitem(last=False)
            self._gathered_files -= len(oldest.kept)
        return gathered.contents

    async def read(self, skill: Skill, path: str) -> bytes:
        """A file of a skill by its path in the folder; SKILL.md is the document in any spelling.

        Raises:
            UnknownSkill: the skill is gone or has no such file; the message names the nearest.
            TooLarge: it has more than 16 MiB.
            Busy: it is being written all the time.
        """
        if _leads_astray(path):
            raise UnknownSkill(
                f"{path[:140]!r} is no path of a file in the skill {skill.name!r}: give one "
                "relative to its folder, such as 'references/guide.md'"
            )
        try:
            return await to_thread.run_sync(self._read, skill, path, limiter=self._reading)
        except OSError as exc:
            nearest = await self._nearest(skill, path)
            raise UnknownSkill(
                f"the skill {skill.name!r} has no file {path[:140]!r}{nearest}"
            ) from exc

    async def beginnings(self, skills: Sequence[Skill], size: int) -> Mapping[str, bytes]:
        """The first bytes of the documents of skills, by uri; those that are gone are left out."""
        return await to_thread.run_sync(self._beginnings, skills, size, limiter=self._reading)

    def _merge(self, parts: list[Catalogue]) -> Catalogue:
        key = tuple(map(id, parts))
        if key not in self._merged:
            # The parts are kept with it: while they live, nothing else has their ids.
            self._merged[key] = (parts, merge(parts))
        self._merged.move_to_end(key)
        if len(self._merged) > _MERGED:
            self._merged.popitem(last=False)
        return self._merged[key][1]

    def _gather(self, skill: Skill, before: Gathered | None) -> Gathered:
        try:
            return gather(skill.folder, skill.document, anchor=self._anchor(skill), before=before)
        except OSError as exc:
            raise UnknownSkill(
                f"the skill {skill.name!r} cannot be read any more ({exc.strerror}): "
                "skills_list shows what there is now"
            ) from exc

    def _read(self, skill: Skill, path: str) -> bytes:
        with opened(skill.folder, self._anchor(skill)) as directory:
            return read_whole(directory, skill.document if path == DOCUMENT else path).data

    def _beginnings(self, skills: Sequence[Skill], size: int) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for skill in skills:
            with suppress(OSError), opened(skill.folder, self._anchor(skill)) as directory:
                found[skill.uri] = read_beginning(directory, skill.document, size)
        return found

    def _anchor(self, skill: Skill) -> Path | None:
        """The folder from which on no link is followed to the skill."""
        named = shared_roots(self._settings) if is_trusted(skill) else ()
        shared = (root.folder for root in named)
        folders = (*shared, self._data_dir)
        return next((each for each in folders if skill.folder.is_relative_to(each)), None)

    async def _nearest(self, skill: Skill, path: str) -> str:
        paths = [file.path for file in (await self.contents(skill)).files]
        near = difflib.get_close_matches(path[:140], paths, n=1)
        return f": the nearest is {near[0]!r}" if near else ": its listing shows those it has"


def _leads_astray(path: str) -> bool:
    """Whether a path is none of a skill's file, whatever lies on the disk."""
    odd_parts = not {"", ".", ".."}.isdisjoint(path.split("/"))
    return odd_parts or "\0" in path or not is_utf8(path) or is_junk(path)
