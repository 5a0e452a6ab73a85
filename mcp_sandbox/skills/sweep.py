"""One look at everything in a root, which reads only what changed since the last. Blocking.

What a folder holds is kept by the stamp of the folder, and what a SKILL.md says by the stamp of
the file, so that looking again costs one stat for each. Only a document's head is ever read.
Folders are searched breadth first: what the limits cut is the deepest.

Nothing in a root is trusted. Folders and documents are opened beneath the root without following
links; what is not a regular file is never opened. A link to a folder is followed in a trusted
root, outside of skills, into one of the roots that everybody has or the same root, and only to
a skill: what else lies there is found in that root itself.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from mcp_sandbox.skills import links, problems
from mcp_sandbox.skills.listing import Listing, list_folder
from mcp_sandbox.skills.models import Diagnostic, Problem
from mcp_sandbox.skills.reading import Place, Reading, read_document
from mcp_sandbox.skills.roots import Root, opened
from mcp_sandbox.skills.stamps import Stamp, stamp_of
from mcp_sandbox.workspace.beneath import open_directory, open_file

# Somebody removed or replaced it while we looked; the next look sees what is there then.
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})


@dataclass(frozen=True)
class Limits:
    """How much of a root is looked at and kept; `heads` is in bytes of front matter."""

    depth: int = 6
    folders: int = 10_000
    entries: int = 250_000
    skills: int = 10_000
    heads: int = 8 * 1024 * 1024


UNTRUSTED = Limits(folders=1000, entries=20_000, skills=256, heads=512 * 1024)


@dataclass
class Seen:
    """What a look saw; `found` has a reading for each document, in the order of the search."""

    found: list[Reading] = field(default_factory=list[Reading])
    problems: list[Problem] = field(default_factory=list[Problem])
    listings: dict[str, Listing] = field(default_factory=dict[str, Listing])
    readings: dict[str, Reading] = field(default_factory=dict[str, Reading])


@dataclass
class _Tally:
    """How many paths there were, and the first."""

    count: int = 0
    first: str = ""

    def add(self, paths: Sequence[str]) -> None:
        if paths:
            self.first = self.first or paths[0]
            self.count += len(paths)


class _Item(NamedTuple):
    """A folder to be searched: its path from the root; `inside` says that it is in a skill."""

    path: str
    depth: int = 0
    inside: bool = False
    linked: bool = False

    def paths(self, names: Iterable[str]) -> list[str]:
        """The paths of what has those names in it."""
        return [f"{self.path}/{name}" for name in names] if self.path else list(names)


class Sweep:
    """A walk through a root, which is open as `directory`."""

    def __init__(
        self, directory: int, root: Root, allowed: Sequence[Root], limits: Limits, before: Seen
    ) -> None:
        """`allowed` are the roots that links may lead into, `before` what the last look saw."""
        self._directory = directory
        self._root = root
        self._allowed = allowed
        self._limits = limits
        self._before = before
        self._seen = Seen()
        self._folders = self._entries = self._heads = 0
        self._too_deep, self._skipped = _Tally(), _Tally()

    def run(self) -> Seen:
        """Look at everything.

        Raises:
            OSError: the root itself cannot be listed.
        """
        most_folders, most_entries = self._limits.folders, self._limits.entries
        pending = deque([_Item("")])
        while pending:
            item = pending.popleft()
            if self._folders >= most_folders or self._entries >= most_entries:
                self._complain("", self._cut(item))
                break
            self._folders += 1
            pending.extend(self._look(item))
        if self._too_deep.count:
            deep = self._too_deep
            self._complain("", problems.too_deep(deep.count, deep.first, self._limits.depth))
        if self._skipped.count:
            self._complain("", problems.skipped(self._skipped.count, self._skipped.first))
        return self._seen

    def _cut(self, item: _Item) -> Diagnostic:
        if self._folders >= self._limits.folders:
            return problems.too_many_folders(item.path, self._limits.folders)
        return problems.too_many_entries(item.path, self._limits.entries)

    def _look(self, item: _Item) -> Iterable[_Item]:
        try:
            if item.linked and not self._leads_to_a_folder(item):
                return ()
            return self._look_into(item)
        except OSError as exc:
            if not item.path:
                raise
            if exc.errno not in _VANISHED:
                self._complain(item.path, problems.unreadable(exc))
        except links.Refused:
            self._complain(item.path, problems.link_refused(item.path))
        return ()

    def _look_into(self, item: _Item) -> Iterable[_Item]:
        listing = self._known_listing(item)
        reading = self._known_reading(item, listing) if listing is not None else None
        if listing is None or (reading is None and listing.documents):
            listing, reading = self._read(item, listing)
        self._seen.listings[item.path] = listing
        self._entries += listing.entries
        if reading is not None:
            self._seen.readings[item.path] = reading
            self._seen.found.append(reading)
            self._heads += reading.length
        elif listing.spellings:
            self._complain(item.path, *self._unread(listing))
        return () if item.linked else self._below(item, listing)

    def _known_listing(self, item: _Item) -> Listing | None:
        known = self._before.listings.get(item.path)
        if known is None or not known.settled:
            return None
        now = self._stamp(item.path or ".", open_directory, follow=item.linked)
        return known if now == known.stamp else None

    def _known_reading(self, item: _Item, listing: Listing) -> Reading | None:
        known = self._before.readings.get(item.path) if not self._exhausted else None
        if known is None or not known.settled or known.spellings != listing.spellings:
            return None
        if known.folders != self._names(item):
            return None
        document = f"{item.path}/{listing.documents[0]}" if item.path else listing.documents[0]
        return known if self._stamp(document, open_file, follow=False) == known.stamp else None

    def _stamp(self, path: str, opening: Callable[[int, bytes], int], *, follow: bool) -> Stamp:
        """The stamp of a folder or document as it is now. Raises OSError."""
        if self._root.trusted:
            # Whatever the folders' names lead to by now: the stamp tells whether it is the same.
            return stamp_of(os.stat(path, dir_fd=self._directory, follow_symlinks=follow))
        # A stat would follow links above what it is of, and one could lead to where it hangs.
        file = opening(self._directory, os.fsencode(path))
        try:
            return stamp_of(os.fstat(file))
        finally:
            os.close(file)

    def _read(self, item: _Item, listing: Listing | None) -> tuple[Listing, Reading | None]:
        """What lies in a folder, unless that is known, and what its document says."""
        directory, folder = self._open(item)
        try:
            if listing is None:
                listing = list_folder(directory, self._limits.entries - self._entries)
            if not listing.documents or self._exhausted:
                return listing, None
            reading = self._known_reading(item, listing)
            if reading is None:
                place = Place(self._root.name, self._names(item), folder)
                reading = read_document(directory, listing.spellings, place)
            return listing, reading
        finally:
            os.close(directory)

    def _open(self, item: _Item) -> tuple[int, Path]:
        """A descriptor of a folder, and where it is on the host."""
        if not item.linked:
            path = os.fsencode(item.path or ".")
            return open_directory(self._directory, path), self._root.folder / item.path
        root, inner = links.target_of(self._root.folder / item.path, self._allowed)
        with opened(root.folder, root.anchor) as base:
            return open_directory(base, os.fsencode(inner or ".")), root.folder / inner

    def _names(self, item: _Item) -> tuple[str, ...]:
        """The folders' names in uris; in a root that is a skill itself they begin with its own."""
        own = self._root.folder.name
        if not item.path:
            return (own,)
        names = item.path.split("/")
        return (own, *names) if self._seen.listings[""].documents else (*names,)

    @property
    def _exhausted(self) -> bool:
        skills, heads = self._limits.skills, self._limits.heads
        return len(self._seen.found) >= skills or self._heads >= heads

    def _unread(self, listing: Listing) -> Iterable[Diagnostic]:
        """Why nothing was read in a folder that has a spelling of SKILL.md."""
        if listing.documents:
            yield problems.too_many_skills(self._limits.skills, self._limits.heads)
        else:
            yield from map(problems.document_is_link, listing.linked)
            yield from map(problems.not_a_file, listing.special)

    def _below(self, item: _Item, listing: Listing) -> Iterable[_Item]:
        if listing.is_flat:
            return ()
        self._skipped.add(item.paths(listing.skipped))
        folders = item.paths(listing.folders)
        if item.depth >= self._limits.depth:
            self._too_deep.add(folders)
            return ()
        depth, inside = item.depth + 1, item.inside or bool(listing.spellings)
        further = [_Item(path, depth, inside) for path in folders]
        if not inside:
            further += [_Item(path, depth, linked=True) for path in item.paths(listing.links)]
        return further

    def _leads_to_a_folder(self, item: _Item) -> bool:
        """Whether a link does; what it leads to in an untrusted root is not even looked at."""
        if not self._root.trusted:
            raise links.Refused
        try:
            status = os.stat(item.path, dir_fd=self._directory)
        except OSError as exc:
            self._complain(item.path, problems.link_broken(item.path, exc))
            return False
        return S_ISDIR(status.st_mode)

    def _complain(self, path: str, *found: Diagnostic) -> None:
        if found:
            folder = self._root.folder / path
            self._seen.problems.append(Problem(self._root.name, folder, found))
