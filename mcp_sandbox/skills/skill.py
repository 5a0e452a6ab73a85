"""What a skill is made of, once it has been read, its uris, and the words for what is wrong.

`skill://{root}/{further folders}/{name}/{file}` names a file of a skill. No I/O.

Each part is percent-encoded by itself, from the bytes that the file system has, so that any name
makes a uri of exactly as many parts as its path has, and none leads anywhere else.
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

SCHEME = "skill://"
DOCUMENT = "SKILL.md"
_LOWER = DOCUMENT.lower()
SCRIPT_ENDINGS = (
    *(".bash", ".bat", ".cjs", ".cmd", ".go", ".js", ".lua", ".mjs", ".php", ".pl", ".ps1", ".py"),
    *(".r", ".rb", ".sh", ".ts", ".zsh"),
)
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Level = Literal["error", "warning", "note"]
FileKind = Literal["text", "binary"]

_MOVE = "Move skills nearer to the root, or name their folder as a root of its own."
_NAME_IT = "Links and mounts are not followed there: name the folder itself in skills.folders."
_LINKED = frozenset({errno.EXDEV, errno.ELOOP, errno.ENOTDIR})
_KNOWN: Mapping[str, tuple[Level, str, str]] = {
    "root-unreadable": ("error", "The folder {path} cannot be opened: {error}.",
        "Create it, or correct the settings."),
    "unreadable": ("error", "It cannot be read: {error}.",
        "Let the server's user read it; what lies on another mount has to be a root of its own."),
    "not-a-file": ("error", "{file} is not a regular file.", "Put a text file there."),
    "link": ("error",
        "{file} is a symbolic link; files of a skill are not read through links.",
        "Put a copy of the file there; a link to the whole folder may be allowed."),
    "document-too-large": ("error", "{file} has {size:,} bytes; {limit:,} are the limit.",
        "Move what is not instructions into files beside it."),
    "several-documents": ("warning", "The folder has {file} and also {others}; {file} is used.",
        "Keep one of them."),
    "link-refused": ("warning",
        "The link {file} does not lead to a folder in a root that is allowed here.",
        "Name the folder that it leads to in skills.folders, or put a copy in its place."),
    "link-broken": ("warning", "The link {file} leads nowhere: {error}.",
        "Remove it, or correct it."),
    "skipped": ("note", "Folders of tools are not searched: {many}.",
        "Move skills out of such folders."),
    "too-deep": ("note", "What lies more than {limit} folders deep is not searched: {many}.",
        _MOVE),
    "too-many-folders": ("warning",
        "Only the first {limit:,} folders were searched, the nearest first, up to {file}.",
        _MOVE),
    "too-many-entries": ("warning",
        "Only {limit:,} files and folders were looked at, the nearest first, up to {file}.",
        _MOVE),
    "too-many-skills": ("error", "Skills before it take all that a root may have: {skills:,}, or "
        "{heads:,} bytes of front matter.",
        "Remove skills that are not used, or shorten their front matter."),
    "left-out": ("warning", "{file} is left out: {why}.",
        "Put a regular file with a plain name there, or remove it."),
    "over-the-limit": ("warning",
        "The skill has more than {what}, so that only its SKILL.md is offered.",
        "Remove files, or divide the skill."),
}  # fmt: skip


def is_document(name: str) -> bool:
    """Return whether a file of that name is a skill's document, in any spelling."""
    return len(name) == len(DOCUMENT) and name.lower() == _LOWER


def document_among(names: Iterable[str]) -> str:
    """Return the document among the names in a folder; the usual spelling comes first."""
    found = filter(is_document, names)
    return min(found, key=lambda name: (name != DOCUMENT, name), default=DOCUMENT)


def skill_uri(root: str, folders: Iterable[str], name: str) -> str:
    """Return the uri of a skill, which is the uri of its SKILL.md."""
    return f"{SCHEME}{root}/{_joined((*folders, name))}/{DOCUMENT}"


def file_uri(skill: str, path: str) -> str:
    """Return the uri of a skill's file; `path` is relative to the skill's folder."""
    return skill.removesuffix(DOCUMENT) + _joined(path.split("/"))


def _joined(parts: Iterable[str]) -> str:
    return "/".join(quote(os.fsencode(part), safe="") for part in parts)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something that is wrong with a skill, and what to do about it.

    level: "error": the skill cannot be used. "warning": it is used all the same; a stricter reader
    may refuse it. "note": worth knowing. `code` is a stable word such as "name-mismatch"; `file` is
    relative to the skill's folder, `line` counts from 1.
    """

    code: str
    level: Level
    reason: str
    fix: str
    line: int | None = None
    file: str = "SKILL.md"


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """What stands between the two lines of dashes of a `SKILL.md`.

    `fields` has every field in the file's order: scalars are the text that the file has, whatever
    YAML would make of them; `front_matter.as_json` says what hosts make of them. The others are
    read from it.
    """

    name: str
    description: str
    fields: Mapping[str, Json]
    license: str = ""
    compatibility: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Json])
    allowed_tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    argument_hint: str = ""
    user_invocable: bool = True
    model_invocable: bool = True


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill that can be used.

    `uri` is its identity: `skill://{root}/{further folders}/{name}/SKILL.md`. `folder` is where it
    lies on the host, `document` how its `SKILL.md` is spelled there, `body_at` the byte at
    which the text after the front matter begins. `shadowed_by` is the uri of the skill that
    its bare name means instead. `outline` has the headings of its text, one to a line;
    `stamp` tells one state of its SKILL.md from another.
    """

    uri: str
    root: str
    folder: Path
    front: FrontMatter
    document: str = "SKILL.md"
    body_at: int = 0
    diagnostics: tuple[Diagnostic, ...] = ()
    shadowed_by: str | None = None
    outline: str = ""
    stamp: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.front.name


@dataclass(frozen=True)
class Problem:
    """A folder that has something of a skill and offers none, or one that could not be searched."""

    root: str
    folder: Path
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class SkillFile:
    """A file of a skill: its path in the folder, bytes, and "sha256:…" of its raw bytes."""

    path: str
    size: int
    digest: str
    mime: str
    kind: FileKind


@dataclass(frozen=True)
class Contents:
    """All files of a skill, by path; `digest` ("sha256:…") changes with any byte of any of them.

    `diagnostics` say which files are left out, and why.
    """

    files: tuple[SkillFile, ...]
    digest: str
    diagnostics: tuple[Diagnostic, ...] = ()


def make_diagnostic(code: str, file: str = "SKILL.md", **values: object) -> Diagnostic:
    """Return a known diagnostic; names in it that are not UTF-8 are escaped."""
    level, reason, fix = _KNOWN[code]
    error = values.get("error")
    if isinstance(error, OSError):
        values["error"] = os.strerror(error.errno or 0)
        if code == "root-unreadable" and error.errno in _LINKED:
            fix = _NAME_IT
    reason = reason.format(file=file, **values)
    reason, file = (text.encode(errors="backslashreplace").decode() for text in (reason, file))
    return Diagnostic(code, level, reason, fix, file=file)


def summarize_many(code: str, paths: Sequence[str], **values: object) -> Diagnostic:
    """Return one diagnostic for several paths: it names the first and counts the others."""
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    return make_diagnostic(code, paths[0], many=f"{paths[0]}{more}", **values)
