"""What lies in a folder, as far as finding skills goes. Blocking."""

import os
import time
from itertools import islice
from typing import NamedTuple

from mcp_sandbox.skills.junk import JUNK_FOLDERS
from mcp_sandbox.skills.stamps import Stamp, is_settled, stamp_of
from mcp_sandbox.skills.uris import DOCUMENT, is_document

_USUAL = (DOCUMENT,)


class Listing(NamedTuple):
    """The names that matter, sorted, and the folder's stamp from before it was looked into.

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
    cut: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Everything that has a spelling of SKILL.md."""
        return self.documents + self.linked + self.special

    @property
    def is_flat(self) -> bool:
        """Whether there are no folders in it, nor what may lead to one."""
        return not (self.folders or self.links or self.skipped)


def list_folder(directory: int, limit: int) -> Listing:
    """What lies in an open folder; entries after the first `limit` are not seen. Raises OSError."""
    now = time.time_ns()
    stamp = stamp_of(os.fstat(directory))
    settled = is_settled(stamp, now)
    with os.scandir(directory) as entries:
        found = list(islice(entries, limit + 1))
    if len(found) == 1 and found[0].name == DOCUMENT and found[0].is_file(follow_symlinks=False):
        return Listing(stamp, settled, 1, _USUAL)
    cut = len(found) > limit
    return _sorted(found[:limit], stamp, settled=settled and not cut, cut=cut)


def _sorted(
    entries: list["os.DirEntry[str]"], stamp: Stamp, *, settled: bool, cut: bool
) -> Listing:
    documents, linked, special = list[str](), list[str](), list[str]()
    folders, links = list[str](), list[str]()
    for entry in entries:
        name = entry.name
        named_so = is_document(name)
        if entry.is_symlink():
            (linked if named_so else links).append(name)
            continue
        if entry.is_dir(follow_symlinks=False):
            folders.append(name)
        if named_so:
            is_file = entry.is_file(follow_symlinks=False)
            (documents if is_file else special).append(name)
    return Listing(
        stamp=stamp,
        settled=settled,
        entries=len(entries),
        documents=tuple(sorted(documents, key=lambda name: (name != DOCUMENT, name))),
        linked=tuple(sorted(linked)),
        special=tuple(sorted(special)),
        folders=tuple(sorted(name for name in folders if name not in JUNK_FOLDERS)),
        links=tuple(sorted(links)),
        skipped=tuple(sorted(name for name in folders if name in JUNK_FOLDERS)),
        cut=cut,
    )
