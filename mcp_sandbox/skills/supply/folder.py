"""Reads a folder of this machine into a tree, while others may change it."""

import errno
import os
import stat
from pathlib import Path

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.supply.tree import Collector, Tree, check_path, is_junk, show, too_large
from mcp_sandbox.workspace import beneath

# Entries looked at, junk included.
_MAX_ENTRIES = 20_000


def read_folder(path: Path) -> Tree:
    """Return all files of a folder; a link to a folder is followed, links inside are refused.

    Raises:
        SourceUnavailable: it cannot be read.
        UnusableSkill: it holds links or special files, or more than a skill may.
    """
    try:
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise SourceUnavailable(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        return _Reading(root).tree()
    except OSError as exc:
        raise SourceUnavailable(
            f"{path} cannot be read ({exc.strerror}: {show(str(exc.filename or ''))}): make "
            "all its files readable, and try again"
        ) from exc
    finally:
        os.close(root)


class _Reading:
    def __init__(self, root: int) -> None:
        self._root = root
        self._collected = Collector()
        self._looked_at = 0

    def tree(self) -> Tree:
        pending = [""]
        while pending:
            pending.extend(self._enter(pending.pop()))
        return self._collected.tree()

    def _enter(self, folder: str) -> list[str]:
        """Take the files of a folder; returns the folders in it."""
        directory = beneath.open_directory(self._root, os.fsencode(folder or "."))
        try:
            with os.scandir(directory) as entries:
                found = sorted(
                    (entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries
                )
        finally:
            os.close(directory)
        self._looked_at += len(found)
        if self._looked_at > _MAX_ENTRIES:
            raise UnusableSkill(f"the folder has more than {_MAX_ENTRIES} entries: name one skill")
        folders = list[str]()
        for name, is_folder in found:
            path = f"{folder}/{name}" if folder else name
            if is_junk(f"{path}/_" if is_folder else path):
                continue
            if is_folder:
                check_path(path)
                folders.append(path)
            else:
                self._take(path)
        return folders

    def _take(self, path: str) -> None:
        self._collected.expect(path)
        room = self._collected.room
        try:
            file = beneath.open_file(self._root, os.fsencode(path))
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EXDEV):
                raise UnusableSkill(
                    f"{show(path)} is a link or a special file: put a plain file there"
                ) from exc
            raise
        with os.fdopen(file, "rb") as stream:
            mode = os.fstat(file).st_mode
            data = stream.read(room + 1)
        if len(data) > room:
            raise too_large()
        self._collected.add(path, data, executable=bool(mode & stat.S_IXUSR))
