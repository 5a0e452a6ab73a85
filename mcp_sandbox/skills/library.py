"""All skills that there are: the way into this package.

Folders are polled rather than watched by the kernel: that works on every file system and through
every mount, needs no watch for each folder, and a program that writes thousands of files next to a
skill costs no more than the next scan. A scan without changes costs a stat or two for each
skill. Nothing is polled when no caller waits.
"""

import difflib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import anyio
from anyio import CapacityLimiter, to_thread

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.skills.catalogue import Catalogue, merge
from mcp_sandbox.skills.contents import (
    SkillSnapshot,
    gather,
    is_junk,
    is_utf8,
    open_folder,
    read_whole,
)
from mcp_sandbox.skills.scan import Scanner, Whose, is_trusted, roots, shared_roots
from mcp_sandbox.skills.skill import DOCUMENT, Contents, Skill

# A slow scan is repeated less often, so that scanning takes at most this share of one CPU.
_MAX_SHARE = 0.05
# Scanners of users and chats that ask no more are dropped, the least recent first.
_REMEMBERED = 64
_GATHERED_FILES = 20_000


@dataclass(frozen=True)
class RefreshPace:
    """How often to scan, how long edits must have rested, and how long to wait for that."""

    poll_s: float = 1.0
    settle_s: float = 1.0
    patience_s: float = 10.0


class SkillLibrary:
    """The skills of all roots, for any chat. Every call checks for changes."""

    def __init__(
        self, settings: SkillsConfig, data_dir: Path, *, pace: RefreshPace | None = None
    ) -> None:
        """Read nothing yet; `pace` says how often to look for changes."""
        self._pace = pace or RefreshPace()
        self._settings = settings
        self._data_dir = data_dir
        remember = lru_cache(_REMEMBERED + len(settings.folders))
        self._scanner = remember(lambda root: Scanner(root, shared_roots(settings)))
        # Keyed by the identity of the catalogues, so that the same ones give the same result.
        self._merge = lru_cache(32)(merge)
        self._gathered: OrderedDict[Path, SkillSnapshot] = OrderedDict()
        self._looking = CapacityLimiter(4)
        self._reading = CapacityLimiter(4)

    async def catalogue(self, whose: Whose, *, max_age_s: float = 0.0) -> Catalogue:
        """Return what a chat or user is offered, at most `max_age_s` seconds out of date.

        It is the same object as before as long as nothing changed.

        Raises InvalidArgument: no user can have that id.
        """
        since = time.monotonic() - max_age_s
        parts = await to_thread.run_sync(self._look, whose, since, limiter=self._looking)
        return self._merge(tuple(part for part in parts if part.skills or part.problems))

    @asynccontextmanager
    async def changes(self, whose: Whose) -> AsyncGenerator[AsyncIterator[Set[str]]]:
        """Yield the uris of added, removed and edited skills, one set for each burst of edits."""
        async with aclosing(self._changes(whose, await self.catalogue(whose))) as changes:
            yield changes

    async def _changes(self, whose: Whose, before: Catalogue) -> AsyncGenerator[Set[str]]:
        poll_s = pause = self._pace.poll_s
        while True:
            await anyio.sleep(pause)
            began = time.monotonic()
            now = await self.catalogue(whose, max_age_s=poll_s / 2)
            pause = max(poll_s, (time.monotonic() - began) / _MAX_SHARE)
            if now is not before and now.changed_since(before):
                now = await self._rested(whose, now)
                if changed := now.changed_since(before):
                    yield changed
            before = now

    async def _rested(self, whose: Whose, catalogue: Catalogue) -> Catalogue:
        with anyio.move_on_after(self._pace.patience_s):
            while True:
                await anyio.sleep(self._pace.settle_s)
                now = await self.catalogue(whose)
                if now is catalogue or not now.changed_since(catalogue):
                    return now
                catalogue = now
        return catalogue

    async def contents(self, skill: Skill) -> Contents:
        """Return all files of a skill; only those that changed since the last call are read.

        Raises:
            UnknownSkill: it is gone.
            Busy: a file of it is being written all the time.
            TooLarge: its document has more than 16 MiB.
        """
        # A stat compares with what is known, and follows links: not for untrusted folders.
        known = self._gathered.get(skill.folder) if is_trusted(skill) else None
        gathered = await to_thread.run_sync(self._gather, skill, known, limiter=self._reading)
        self._gathered[skill.folder] = gathered
        self._gathered.move_to_end(skill.folder)
        while sum(len(each.cached) for each in self._gathered.values()) > _GATHERED_FILES:
            self._gathered.popitem(last=False)
        return gathered.contents

    async def read(self, skill: Skill, path: str) -> bytes:
        """Read a file of a skill by its path in the folder; SKILL.md finds any spelling of it.

        Raises:
            UnknownSkill: the skill is gone or has no such file; the message names the nearest.
            TooLarge: it has more than 16 MiB.
            Busy: it is being written all the time.
        """
        odd_parts = not {"", ".", ".."}.isdisjoint(path.split("/"))
        if odd_parts or "\0" in path or not is_utf8(path) or is_junk(path):
            raise UnknownSkill(
                f"{path[:140]!r} is no path of a file in the skill {skill.name!r}: give one "
                "relative to its folder, such as 'references/guide.md'"
            )
        try:
            return await to_thread.run_sync(self._read, skill, path, limiter=self._reading)
        except OSError as exc:
            paths = [file.path for file in (await self.contents(skill)).files]
            near = difflib.get_close_matches(path[:140], paths, n=1)
            hint = f"the nearest is {near[0]!r}" if near else "its listing shows those it has"
            raise UnknownSkill(
                f"the skill {skill.name!r} has no file {path[:140]!r}: {hint}"
            ) from exc

    def _look(self, whose: Whose, since: float) -> list[Catalogue]:
        wanted = roots(self._settings, self._data_dir, whose)
        return [self._scanner(root).look(since) for root in wanted]

    def _gather(self, skill: Skill, before: SkillSnapshot | None) -> SkillSnapshot:
        try:
            return gather(skill.folder, skill.document, anchor=self._anchor(skill), before=before)
        except OSError as exc:
            raise UnknownSkill(
                f"the skill {skill.name!r} cannot be read any more ({exc.strerror}): "
                "skills_list shows what there is now"
            ) from exc

    def _read(self, skill: Skill, path: str) -> bytes:
        with open_folder(skill.folder, self._anchor(skill)) as directory:
            return read_whole(directory, skill.document if path == DOCUMENT else path).data

    def _anchor(self, skill: Skill) -> Path | None:
        """Return the folder below which no link is followed on the way to the skill."""
        named = shared_roots(self._settings) if is_trusted(skill) else ()
        folders = (*(root.folder for root in named), self._data_dir)
        return next((each for each in folders if skill.folder.is_relative_to(each)), None)
