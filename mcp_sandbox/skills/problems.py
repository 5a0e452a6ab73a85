"""The words for what is wrong with folders; what is wrong inside a SKILL.md, `parse` says. Pure."""

import errno
import os
from collections.abc import Iterable

from mcp_sandbox.skills.models import Diagnostic, Level

_MOVE = "Move skills nearer to the root, or name their folder as a root of its own."


def _said(code: str, level: Level, reason: str, fix: str, file: str = "SKILL.md") -> Diagnostic:
    """A diagnostic that can be written as UTF-8, whatever bytes the names in it have."""
    reason, file = (text.encode(errors="backslashreplace").decode() for text in (reason, file))
    return Diagnostic(code, level, reason, fix, file=file)


def _and_more(first: str, count: int) -> str:
    return f"{first} and {count - 1:,} more" if count > 1 else first


def absent(path: str, error: OSError) -> Diagnostic:
    """A root that cannot be opened."""
    reason = f"The folder {path} cannot be opened: {os.strerror(error.errno or 0)}."
    fix = "Create it, or correct the settings."
    if error.errno in {errno.EXDEV, errno.ELOOP, errno.ENOTDIR}:
        fix = "Links and mounts are not followed there: name the folder itself in skills.folders."
    return _said("root-unreadable", "error", reason, fix)


def unreadable(error: OSError, file: str = "SKILL.md") -> Diagnostic:
    """A folder or document that cannot be opened."""
    reason = f"It cannot be read: {os.strerror(error.errno or 0)}."
    fix = "Let the server's user read it; what lies on another mount has to be a root of its own."
    return _said("unreadable", "error", reason, fix, file=file)


def not_a_file(document: str) -> Diagnostic:
    """A SKILL.md that is a folder, pipe, socket or device."""
    reason = f"{document} is not a regular file."
    return _said("not-a-file", "error", reason, "Put a text file there.", file=document)


def document_is_link(document: str) -> Diagnostic:
    """A SKILL.md that is a symbolic link."""
    reason = f"{document} is a symbolic link; files of a skill are not read through links."
    fix = "Put a copy of the file there; a link to the whole folder may be allowed."
    return _said("link", "error", reason, fix, file=document)


def too_large(document: str, size: int, limit: int) -> Diagnostic:
    """A SKILL.md that no model could read."""
    reason = f"{document} has {size:,} bytes; {limit:,} are the limit."
    fix = "Move what is not instructions into files beside it."
    return _said("document-too-large", "error", reason, fix, file=document)


def several_documents(used: str, others: Iterable[str]) -> Diagnostic:
    """A folder with a SKILL.md in more than one spelling."""
    reason = f"The folder has {used} and also {', '.join(others)}; {used} is used."
    return _said("several-documents", "warning", reason, "Keep one of them.", file=used)


def link_refused(name: str) -> Diagnostic:
    """A linked folder that leads out of the roots, or lies where links are not followed."""
    reason = f"The link {name} does not lead to a folder in a root that is allowed here."
    fix = "Name the folder that it leads to in skills.folders, or put a copy in its place."
    return _said("link-refused", "warning", reason, fix, file=name)


def link_broken(name: str, error: OSError) -> Diagnostic:
    """A link to nothing, or to itself."""
    reason = f"The link {name} leads nowhere: {os.strerror(error.errno or 0)}."
    return _said("link-broken", "warning", reason, "Remove it, or correct it.", file=name)


def skipped(count: int, first: str) -> Diagnostic:
    """Folders of version control, packages and caches."""
    reason = f"Folders of tools are not searched: {_and_more(first, count)}."
    return _said("skipped", "note", reason, "Move skills out of such folders.", file=first)


def too_deep(count: int, first: str, limit: int) -> Diagnostic:
    """Folders below the depth that is searched."""
    reason = f"What lies more than {limit} folders deep is not searched: {_and_more(first, count)}."
    return _said("too-deep", "note", reason, _MOVE, file=first)


def too_many_folders(first: str, limit: int) -> Diagnostic:
    """A root with more folders than are searched."""
    reason = f"Only the first {limit:,} folders were searched, the nearest first, up to {first}."
    return _said("too-many-folders", "warning", reason, _MOVE, file=first)


def too_many_entries(first: str, limit: int) -> Diagnostic:
    """A root with more files and folders than are looked at."""
    reason = f"Only {limit:,} files and folders were looked at, the nearest first, up to {first}."
    return _said("too-many-entries", "warning", reason, _MOVE, file=first)


def too_many_skills(skills: int, heads: int) -> Diagnostic:
    """A skill that comes after as many as are kept, or as much front matter."""
    reason = f"Skills before it take all that a root may have: {skills:,}, or {heads:,} bytes of "
    fix = "Remove skills that nobody uses, or shorten their front matter."
    return _said("too-many-skills", "error", f"{reason}front matter.", fix)


def left_out(path: str, why: str) -> Diagnostic:
    """A file or folder in a skill that is not offered with it."""
    reason = f"{path} is left out: {why}."
    fix = "Put a regular file with a plain name there, or remove it."
    return _said("left-out", "warning", reason, fix, file=path)


def over_the_limit(what: str) -> Diagnostic:
    """A skill of which only the SKILL.md is offered."""
    reason = f"The skill has more than {what}, so that only its SKILL.md is offered."
    return _said("over-the-limit", "warning", reason, "Remove files, or divide the skill.")
