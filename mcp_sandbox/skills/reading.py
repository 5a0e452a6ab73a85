"""Reads the head of one SKILL.md and makes a skill of it, or a problem. Blocking."""

import errno
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.skills import problems
from mcp_sandbox.skills.front_matter import HEAD_BYTES
from mcp_sandbox.skills.models import Diagnostic, Problem, Skill
from mcp_sandbox.skills.parse import Parsed, parse
from mcp_sandbox.skills.stamps import Stamp, is_settled, stamp_of
from mcp_sandbox.skills.uris import skill_uri

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_DOCUMENT_BYTES = 1024 * 1024
"""A longer SKILL.md is not offered: no model can read it."""


class Place(NamedTuple):
    """Where a skill lies: the root's name, the folders' names to it there, and on the host."""

    root: str
    folders: tuple[str, ...]
    folder: Path


class Reading(NamedTuple):
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


def read_document(directory: int, spellings: tuple[str, ...], place: Place) -> Reading:
    """Read the document in an open folder. Raises OSError."""
    document, *others = spellings
    file = os.open(document, _FLAGS, dir_fd=directory)
    try:
        now = time.time_ns()
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), document)
        stamp = stamp_of(status)
        data = os.read(file, min(stamp[-1], HEAD_BYTES))
    finally:
        os.close(file)
    parsed = parse(data, place.folders[-1], document, size=stamp[-1])
    noticed = (problems.several_documents(document, others),) if others else ()
    result = _judged(parsed, place, document, stamp[-1], noticed)
    return Reading(stamp, is_settled(stamp, now), place.folders, spellings, result, parsed.body_at)


def _judged(
    parsed: Parsed, place: Place, document: str, size: int, noticed: tuple[Diagnostic, ...]
) -> Skill | Problem:
    diagnostics = (*noticed, *parsed.diagnostics)
    front = parsed.front
    if size > MAX_DOCUMENT_BYTES:
        large = problems.too_large(document, size, MAX_DOCUMENT_BYTES)
        return Problem(place.root, place.folder, (*diagnostics, large))
    if front is None:
        return Problem(place.root, place.folder, diagnostics)
    # A name that is not the folder's is a further part, so that no neighbour can have the same.
    named_alike = front.name == place.folders[-1]
    folders = place.folders[:-1] if named_alike else place.folders
    return Skill(
        uri=skill_uri(place.root, folders, front.name),
        root=place.root,
        folder=place.folder,
        front=front,
        document=document,
        body_at=parsed.body_at,
        diagnostics=diagnostics,
    )
