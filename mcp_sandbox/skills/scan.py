"""Where skills are looked for, and what is found there. Blocking.

assistant, assistant-2 …  the folders of the settings, in their order
workspace                 /workspace/skills of the chat, if the settings allow it; untrusted
user                      {data}/skills/{user}/
shipped                   what comes with this program

Of two skills with one name that of the earlier root comes first. Roots are scanned repeatedly, and
only what changed is read.

A scan costs a stat for each folder and each SKILL.md as long as none has changed; when one has,
all folders are searched, and the heads of documents that changed are read; the rest never is.
Folders are searched breadth first: what the limits cut is the deepest.

Nothing in a root is trusted. Folders and documents are opened beneath the root without following
links; what is not a regular file is never opened. A link to a folder is followed in a trusted
root, outside of skills, into one of the roots that everybody has or the same root, and only to
a skill: what else lies there is found in that root itself.
"""

import errno
import functools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.durable import closing_fd
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.contents import JUNK_FOLDERS, Stamp, is_settled, open_folder, stamp_of
from mcp_sandbox.skills.front_matter import HEAD_BYTES
from mcp_sandbox.skills.parse import list_headings, parse
from mcp_sandbox.skills.skill import (
    DOCUMENT,
    Diagnostic,
    Problem,
    Skill,
    is_document,
    make_diagnostic,
    skill_uri,
    summarize_many,
)
from mcp_sandbox.workspace.beneath import open_directory
from mcp_sandbox.workspace.directory import tree_name

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_DOCUMENT_BYTES = 1024 * 1024
"""A longer SKILL.md is not offered: no model can read it."""
# It was removed or replaced during the scan; the next scan sees what is there then.
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})
_UNTRUSTED = "workspace"
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "_skills", _PACKAGE.parent / "skills")

Whose = ChatId | str
"""A chat, or a user of whom no chat is known."""


@dataclass(frozen=True)
class SkillRoot:
    """A folder of skills with a name.

    What is in an untrusted one may have been written by a sandbox. `anchor` is the folder above it
    that the operator named; from there on no link is followed. An optional root may be absent.
    """

    name: str
    folder: Path
    trusted: bool = True
    anchor: Path | None = None
    optional: bool = False


class FolderListing(NamedTuple):
    """The names that matter in a folder, sorted, and its stamp from before it was listed.

    `documents` are regular files, the one that counts first. `linked` and `special` have a
    spelling of SKILL.md too, but are symbolic links, or neither files nor links. `links` may lead
    to folders; `skipped` are folders of tools. `entries` counts everything that was looked at.
    """

    stamp: Stamp
    settled: bool
    entries: int
    documents: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.documents + self.linked + self.special


def list_folder(directory: int, limit: int) -> FolderListing:
    """List an open folder; entries after the first `limit` are ignored. Raises OSError."""
    now = time.time_ns()
    stamp = stamp_of(os.fstat(directory))
    settled = is_settled(stamp, now)
    with os.scandir(directory) as entries:
        found = list(islice(entries, limit + 1))
    names: dict[str, list[str]] = {}
    for entry in sorted(found[:limit], key=lambda entry: (entry.name != DOCUMENT, entry.name)):
        named_so, linked = is_document(entry.name), entry.is_symlink()
        if not linked and entry.is_dir(follow_symlinks=False):
            kind = "skipped" if entry.name in JUNK_FOLDERS else "folders"
            names.setdefault(kind, []).append(entry.name)
        if named_so and not linked:
            kind = "documents" if entry.is_file(follow_symlinks=False) else "special"
            names.setdefault(kind, []).append(entry.name)
        elif linked:
            names.setdefault("linked" if named_so else "links", []).append(entry.name)
    complete, all_names = len(found) <= limit, {kind: tuple(each) for kind, each in names.items()}
    return FolderListing(stamp, settled and complete, len(found[:limit]), **all_names)


class FolderReading(NamedTuple):
    """What became of the first of a folder's `spellings`: a skill, or a problem.

    `folders` are the names on the way to it in the root; `length` counts the bytes of its front
    matter.
    """

    stamp: Stamp
    settled: bool
    folders: tuple[str, ...]
    spellings: tuple[str, ...]
    result: Skill | Problem
    length: int


def read_document(
    directory: int, spellings: tuple[str, ...], root: str, folders: tuple[str, ...], folder: Path
) -> FolderReading:
    """Read the document in an open folder, which lies in the root by those names. Raises OSError.

    `folder` is where that is on the host.
    """
    document, *others = spellings
    with closing_fd(os.open(document, _FLAGS, dir_fd=directory)) as file:
        now = time.time_ns()
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), document)
        stamp, size = stamp_of(status), status.st_size
        data = os.read(file, min(size, HEAD_BYTES))
    parsed = parse(data, folders[-1], document, size=size)
    front, at, diagnostics = parsed.front, parsed.body_at, parsed.diagnostics
    if others:
        several = make_diagnostic("several-documents", document, others=", ".join(others))
        diagnostics = (several, *diagnostics)
    if size > MAX_DOCUMENT_BYTES:
        large = make_diagnostic("document-too-large", document, size=size, limit=MAX_DOCUMENT_BYTES)
        diagnostics, front = (*diagnostics, large), None
    result: Skill | Problem = Problem(root, folder, diagnostics)
    if front is not None:
        # A name that is not the folder's is a further part, so no neighbour can have the same.
        further = folders[:-1] if front.name == folders[-1] else folders
        uri = skill_uri(root, further, front.name)
        outline = list_headings(data[at:])
        result = Skill(uri, root, folder, front, document, at, diagnostics, None, outline, stamp)
    return FolderReading(stamp, is_settled(stamp, now), folders, spellings, result, at)


class LinkEscapes(Exception):
    """The link leads out of the roots in which it may end."""


@dataclass(frozen=True)
class ScanLimits:
    """How much of a root is looked at and kept; `heads` is in bytes of front matter."""

    depth: int = 6
    folders: int = 10_000
    entries: int = 250_000
    skills: int = 10_000
    heads: int = 8 * 1024 * 1024


UNTRUSTED = ScanLimits(folders=1000, entries=20_000, skills=256, heads=512 * 1024)


@dataclass
class ScanResult:
    """What a scan saw; `readings` are by the folders' paths, in the order of the search.

    `known` has each path, its stamp (None: it led nowhere) and whether links were followed to it.
    If no stamp has changed, nothing has, provided that `settled` is true.
    """

    problems: list[Problem] = field(default_factory=list[Problem])
    readings: dict[str, FolderReading] = field(default_factory=dict[str, FolderReading])
    known: list[tuple[str, Stamp | None, bool]] = field(default_factory=list)
    settled: bool = True

    def is_still(self, directory: int) -> bool:
        """Return whether nothing has changed in the root, which is open as `directory`."""
        return self.settled and all(
            _stamp(directory, path, follow=follow) == stamp for path, stamp, follow in self.known
        )

    def note(self, path: str, stamp: Stamp | None, *, settled: bool, follow: bool = False) -> None:
        self.known.append((path, stamp, follow))
        self.settled &= settled


def _stamp(directory: int, path: str, *, follow: bool = False) -> Stamp | None:
    try:
        return stamp_of(os.stat(path, dir_fd=directory, follow_symlinks=follow))
    except OSError:
        return None


class _Item(NamedTuple):
    """A folder to be searched: its path from the root; `inside` says that it is in a skill."""

    path: str
    depth: int = 0
    inside: bool = False
    linked: bool = False

    def paths(self, names: Iterable[str]) -> list[str]:
        return [f"{self.path}/{name}" for name in names] if self.path else list(names)


class RootScanner:
    """A walk through a root, which is open as `directory`."""

    def __init__(
        self,
        directory: int,
        root: SkillRoot,
        allowed: Sequence[SkillRoot],
        limits: ScanLimits,
        before: ScanResult,
    ) -> None:
        """Take the `allowed` roots that links may lead into, and what the last scan saw."""
        self._directory = directory
        self._root = root
        self._allowed = allowed
        self._limits = limits
        self._before = before
        self._seen = ScanResult()
        self._folders = self._entries = self._heads = 0
        self._is_skill = False
        self._too_deep, self._skipped = list[str](), list[str]()

    def run(self) -> ScanResult:
        """Look at everything. Raises OSError: the root itself cannot be listed."""
        most_folders, most_entries = self._limits.folders, self._limits.entries
        pending = deque([_Item("")])
        while pending:
            item = pending.popleft()
            if self._folders >= most_folders or self._entries >= most_entries:
                reached = "folders" if self._folders >= most_folders else "entries"
                limit = most_folders if reached == "folders" else most_entries
                self._complain("", make_diagnostic(f"too-many-{reached}", item.path, limit=limit))
                break
            self._folders += 1
            pending.extend(self._look(item))
        if self._too_deep:
            self._complain("", summarize_many("too-deep", self._too_deep, limit=self._limits.depth))
        if self._skipped:
            self._complain("", summarize_many("skipped", self._skipped))
        return self._seen

    def _look(self, item: _Item) -> Iterable[_Item]:
        try:
            return self._look_into(item) if not item.linked or self._leads_to_a_folder(item) else ()
        except OSError as exc:
            if not item.path:
                raise
            self._note_unread(item)
            if exc.errno not in _VANISHED:
                self._complain(item.path, make_diagnostic("unreadable", error=exc))
        except LinkEscapes:
            self._note_unread(item)
            self._complain(item.path, make_diagnostic("link-refused", item.path))
        return ()

    def _note_unread(self, item: _Item) -> None:
        now = time.time_ns()
        stamp = _stamp(self._directory, item.path, follow=item.linked)
        settled = stamp is None or is_settled(stamp, now)
        self._seen.note(item.path, stamp, settled=settled, follow=item.linked)

    def _look_into(self, item: _Item) -> Iterable[_Item]:
        directory, folder = self._open_folder(item)
        with closing_fd(directory):
            listing = list_folder(directory, self._limits.entries - self._entries)
            self._entries += listing.entries
            self._is_skill |= not item.path and bool(listing.documents)
            reading = self._read(item, listing, directory, folder)
        path = item.path or "."
        self._seen.note(path, listing.stamp, settled=listing.settled, follow=item.linked)
        if reading is not None:
            document = f"{path}/{listing.documents[0]}"
            self._seen.note(document, reading.stamp, settled=reading.settled)
            self._seen.readings[item.path] = reading
            self._heads += reading.length
        elif listing.documents:
            skills, heads = self._limits.skills, self._limits.heads
            self._complain(
                item.path, make_diagnostic("too-many-skills", skills=skills, heads=heads)
            )
        else:
            special = [make_diagnostic("not-a-file", name) for name in listing.special]
            self._complain(
                item.path, *[make_diagnostic("link", name) for name in listing.linked], *special
            )
        return () if item.linked else self._below(item, listing)

    def _read(
        self, item: _Item, listing: FolderListing, directory: int, folder: Path
    ) -> FolderReading | None:
        """Read the document of an open folder; None if it has none or a limit is reached."""
        many, heads = len(self._seen.readings), self._heads
        if not listing.documents or many >= self._limits.skills or heads >= self._limits.heads:
            return None
        # In a root that is a skill itself the names in uris begin with the root's own.
        own = (self._root.folder.name,) if self._is_skill or not item.path else ()
        names = (*own, *filter(None, item.path.split("/")))
        known = self._before.readings.get(item.path)
        if known is not None and known.settled:
            now = _stamp(directory, listing.documents[0])
            if (known.stamp, known.spellings, known.folders) == (now, listing.spellings, names):
                return known
        return read_document(directory, listing.spellings, self._root.name, names, folder)

    def _open_folder(self, item: _Item) -> tuple[int, Path]:
        if not item.linked:
            path = os.fsencode(item.path or ".")
            return open_directory(self._directory, path), self._root.folder / item.path
        target = os.path.realpath(self._root.folder / item.path, strict=True)
        for root in self._allowed:
            inner = os.path.relpath(target, os.path.realpath(root.folder))
            if inner != ".." and not inner.startswith("../"):
                with open_folder(root.folder, root.anchor) as base:
                    return open_directory(base, os.fsencode(inner)), root.folder / inner
        raise LinkEscapes

    def _below(self, item: _Item, listing: FolderListing) -> Iterable[_Item]:
        self._skipped += item.paths(listing.skipped)
        folders = item.paths(listing.folders)
        if item.depth >= self._limits.depth:
            self._too_deep += folders
            return ()
        depth, inside = item.depth + 1, item.inside or bool(listing.spellings)
        further = [_Item(path, depth, inside) for path in folders]
        if not inside:
            further += [_Item(path, depth, linked=True) for path in item.paths(listing.links)]
        return further

    def _leads_to_a_folder(self, item: _Item) -> bool:
        """Return whether a link does. In untrusted roots it raises LinkEscapes unread."""
        if not self._root.trusted:
            raise LinkEscapes
        try:
            status = os.stat(item.path, dir_fd=self._directory)
        except OSError as exc:
            self._complain(item.path, make_diagnostic("link-broken", item.path, error=exc))
        else:
            if stat.S_ISDIR(status.st_mode):
                return True
        self._note_unread(item)
        return False

    def _complain(self, path: str, *found: Diagnostic) -> None:
        if found:
            self._seen.problems.append(Problem(self._root.name, self._root.folder / path, found))


class Scanner:
    """The skills of a root. May be used from several threads."""

    def __init__(
        self, root: SkillRoot, shared: Sequence[SkillRoot] = (), limits: ScanLimits | None = None
    ) -> None:
        """Take the root, and the `shared` roots that links may lead into."""
        self._root = root
        self._allowed = (root, *shared) if root.trusted else ()
        self._limits = limits or (ScanLimits() if root.trusted else UNTRUSTED)
        self._seen = ScanResult()
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        self._looked_at = float("-inf")

    def look(self, since: float) -> Catalogue:
        """Return what the root has, as seen after `since` (in monotonic seconds)."""
        with self._lock:
            if self._looked_at < since:
                began = time.monotonic()
                self._catalogue = self.scan()
                self._looked_at = began
            return self._catalogue

    def scan(self) -> Catalogue:
        """Return what the root has now; the same object as before if nothing changed."""
        try:
            with open_folder(self._root.folder, self._root.anchor) as directory:
                # A stat would follow links in the folders above: not for untrusted roots.
                if self._root.trusted and self._seen.known and self._seen.is_still(directory):
                    return self._catalogue
                seen = RootScanner(
                    directory, self._root, self._allowed, self._limits, self._seen
                ).run()
        except OSError as exc:
            seen = ScanResult()
            if not self._root.optional or exc.errno != errno.ENOENT:
                diagnostic = make_diagnostic("root-unreadable", path=self._root.folder, error=exc)
                seen.problems.append(Problem(self._root.name, self._root.folder, (diagnostic,)))
        if (seen.readings, seen.problems) != (self._seen.readings, self._seen.problems):
            self._catalogue = _build_catalogue([*seen.readings.values()], seen.problems)
        self._seen = seen
        return self._catalogue


def _build_catalogue(found: Sequence[FolderReading], noticed: Sequence[Problem]) -> Catalogue:
    broken = [each.result for each in found if isinstance(each.result, Problem)]
    pairs = [(each.result, each) for each in found if isinstance(each.result, Skill)]
    # The search goes from the root downwards, and sorting keeps that order where names are equal.
    pairs.sort(key=lambda pair: pair[0].front.name)
    # Two skills get the same uri only where a folder has the name of the skill in its parent: then
    # the skill that has its folder's name keeps it.
    taken = {skill.uri: skill for skill, read in pairs if skill.name == read.folders[-1]}
    skills = list[Skill]()
    for skill, reading in pairs:
        own = skill
        if taken.setdefault(skill.uri, skill) is not skill:
            folders = reading.folders
            while (uri := skill_uri(skill.root, folders, skill.name)) in taken:
                folders = (*folders, "_")
            own = taken[uri] = replace(skill, uri=uri)
        skills.append(own)
    return Catalogue(tuple(skills), (*broken, *noticed))


def roots(settings: SkillsConfig, data_dir: Path, whose: Whose) -> tuple[SkillRoot, ...]:
    """Return the roots of a chat or user, in order of precedence.

    Raises InvalidArgument: no user can have that id.
    """
    if not settings.enabled:
        return ()
    shared = shared_roots(settings)
    assistants = [root for root in shared if root.name != "shipped"]
    chat = whose if isinstance(whose, ChatId) else ChatId(whose, "none")
    own = [SkillRoot("user", data_dir / "skills" / chat.user, anchor=data_dir, optional=True)]
    if settings.workspace and isinstance(whose, ChatId):
        # The same path as `workspace.directory` makes for a chat's files.
        tree = data_dir / "sandbox" / "workspace" / chat.user / os.fsdecode(tree_name(chat))
        folder = tree / "skills"
        own.insert(0, SkillRoot(_UNTRUSTED, folder, trusted=False, anchor=data_dir, optional=True))
    return (*assistants, *own, *shared[len(assistants) :])


def shared_roots(settings: SkillsConfig) -> tuple[SkillRoot, ...]:
    """Return the roots that all users share; links in other roots may lead into them."""
    folders = dict.fromkeys(settings.folders)
    names = ("assistant", *(f"assistant-{number}" for number in range(2, len(folders) + 1)))
    assistants = [SkillRoot(name, folder) for name, folder in zip(names, folders, strict=False)]
    shipped = [SkillRoot("shipped", shipped_folder())] if settings.shipped else []
    return (*assistants, *shipped)


@functools.cache
def shipped_folder() -> Path:
    """Return the shipped skills: in the package if installed, beside it in a checkout."""
    return next((folder for folder in _SHIPPED if folder.is_dir()), _SHIPPED[-1])


def is_trusted(skill: Skill) -> bool:
    """Return whether the skill lies in a root that code in a sandbox cannot write to."""
    return skill.root != _UNTRUSTED
