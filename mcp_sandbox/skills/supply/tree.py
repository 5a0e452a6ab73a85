"""All files of one skill, in memory. Whatever a source says, a `Tree` is small and harmless.

A name that could mean another place, or mean two files on another file system, is refused and
not repaired: who made it can do it again, and who attacks gets nothing.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mcp_sandbox.errors import UnusableSkill
from mcp_sandbox.skills import junk
from mcp_sandbox.skills.contents import MAX_FILES
from mcp_sandbox.skills.files import MAX_BYTES
from mcp_sandbox.skills.uris import is_document

_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255
_MAX_DEPTH = 16
_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True)
class File:
    """A regular file: its bytes, and whether it may be run as a program."""

    data: bytes
    executable: bool = False


Tree = Mapping[str, File]
"""Path in the skill's folder, with slashes -> file."""


class Collector:
    """Gathers the files of a source one by one and stops at the first that is too much."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._keys: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._bytes = 0

    @property
    def room(self) -> int:
        """How many further bytes there may be."""
        return MAX_BYTES - self._bytes

    def add(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Take a file.

        Raises:
            UnusableSkill: its name is not safe or taken, or it is too much.
        """
        self.expect(path)
        if len(data) > self.room:
            raise too_large()
        self._bytes += len(data)
        self._files[path] = File(data, executable)

    def expect(self, path: str) -> None:
        """Look at a name before its bytes are read; then `add` it.

        Raises:
            UnusableSkill: the name is not safe or taken, or it is one file too many.
        """
        check_path(path)
        if len(self._files) >= MAX_FILES:
            raise UnusableSkill(
                f"the skill has more than {MAX_FILES} files: leave out what it does not need"
            )
        self._claim(path)

    def tree(self) -> Tree:
        """Return what was gathered, by path."""
        return dict(sorted(self._files.items()))

    def _claim(self, path: str) -> None:
        """Refuse a second file of a name, also where upper and lower case are the same."""
        if path in self._files:
            raise UnusableSkill(f"{show(path)} is there twice: keep one of them")
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            self._one_spelling(self._folders, folder)
            self._other_kind(self._keys, folder)
        self._one_spelling(self._keys, path)
        self._other_kind(self._folders, path)

    @staticmethod
    def _one_spelling(seen: dict[str, str], path: str) -> None:
        other = seen.setdefault(_folded(path), path)
        if other != path:
            raise UnusableSkill(
                f"{show(other)} and {show(path)} are the same name on some file systems: "
                "rename one of them"
            )

    @staticmethod
    def _other_kind(others: Mapping[str, str], path: str) -> None:
        if _folded(path) in others:
            raise UnusableSkill(f"{show(path)} is both a file and a folder: rename one of them")


def check_path(path: str) -> None:
    """Refuse a path that is not plainly one file beneath the skill's folder.

    Raises:
        UnusableSkill: the message says what is wrong with it.
    """
    problem = _problem(path)
    if problem:
        raise UnusableSkill(f"the file name {show(path)} {problem}: rename the file in its source")


def is_junk(path: str) -> bool:
    """Say whether a path is no part of the skill: what version control and systems leave."""
    return junk.is_junk(path) or path.startswith("__MACOSX/")


def too_large() -> UnusableSkill:
    """Return the error for more bytes than a skill may have."""
    return UnusableSkill(
        f"the skill is larger than {MAX_BYTES >> 20} MiB: leave out what it does not need"
    )


def show(text: str, length: int = 120) -> str:
    """Return a hostile text for a message: quoted, escaped and not long."""
    shown = ascii(text)
    return shown if len(shown) <= length else f"{shown[:length]}…'"


def below(tree: Tree, folder: str) -> Tree:
    """Return what lies in a folder of a tree, as a tree of its own; "" is the tree itself."""
    start = f"{folder}/" if folder else ""
    return {path[len(start) :]: file for path, file in tree.items() if path.startswith(start)}


def documents(paths: Iterable[str]) -> list[str]:
    """Return the paths that are a `SKILL.md` in any spelling, those higher up first."""
    found = [path for path in paths if is_document(path.rsplit("/", 1)[-1])]
    return sorted(found, key=lambda path: (path.count("/"), path))


def _problem(path: str) -> str | None:
    parts = path.split("/")
    if not path or path.startswith("/") or _DRIVE.match(path):
        return "is absolute or empty"
    if "\\" in path:
        return "has a backslash in it"
    if any(part in ("", ".", "..") for part in parts):
        return "goes through '.', '..' or an empty name"
    if any(unicodedata.category(c) in ("Cc", "Cs", "Cf") for c in path):
        return "has characters that cannot be seen"
    return _length_problem(path, parts)


def _length_problem(path: str, parts: list[str]) -> str | None:
    if len(path.encode()) > _MAX_PATH_BYTES or len(parts) > _MAX_DEPTH:
        return f"is longer than {_MAX_PATH_BYTES} bytes or deeper than {_MAX_DEPTH} folders"
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {_MAX_NAME_BYTES} bytes"
    return None


def _folded(path: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())
