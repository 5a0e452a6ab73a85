"""The uris of skills and their files: `skill://{root}/{further folders}/{name}/{file}`. Pure.

Each part is percent-encoded by itself, from the bytes that the file system has, so that any name
makes a uri of exactly as many parts as its path has, and none leads anywhere else.
"""

import os
from collections.abc import Iterable
from urllib.parse import quote

SCHEME = "skill://"
DOCUMENT = "SKILL.md"
_LOWER = DOCUMENT.lower()


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
