r"""All files of a skill, with their digests. Blocking.

A skill's files are the regular files in its folder and below, also those of skills that lie in
it, and without what tools leave there (see `junk`). Links and special files are never opened and
are left out, with a diagnostic; so are names that are not UTF-8. A skill over a limit offers its
document only. The document is called SKILL.md here, however it is spelled on the disk.

The digest of a skill is that of the text which `sha256sum --zero` prints for its files in the
order of their paths' bytes:

    find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum -z | sha256sum
"""

import hashlib
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.skills import problems
from mcp_sandbox.skills.files import MAX_BYTES, read_whole
from mcp_sandbox.skills.junk import JUNK_FOLDERS, is_junk_file
from mcp_sandbox.skills.media import mime_of
from mcp_sandbox.skills.models import Contents, Diagnostic, FileKind, SkillFile
from mcp_sandbox.skills.roots import opened
from mcp_sandbox.skills.stamps import Stamp, is_settled, stamp_of
from mcp_sandbox.skills.uris import DOCUMENT
from mcp_sandbox.workspace.beneath import open_directory

MAX_FILES = 512
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 16
_MAX_DIAGNOSTICS = 100


class Kept(NamedTuple):
    """A file as it was, and its stamp from before it was read."""

    stamp: Stamp
    settled: bool
    file: SkillFile


@dataclass(frozen=True)
class Gathered:
    """A skill's contents, and what tells whether they are still the same."""

    contents: Contents
    kept: Mapping[str, Kept] = field(default_factory=dict[str, Kept], repr=False)


def gather(
    folder: Path,
    document: str = DOCUMENT,
    *,
    anchor: Path | None = None,
    before: Gathered | None = None,
) -> Gathered:
    """All files of the skill in a folder; those that are as they were `before` are not read again.

    Below `anchor`, or the folder itself where there is none, no link is followed.

    Raises:
        OSError: the folder or its document cannot be read.
        TooLarge: the document alone is over the limit.
        Busy: a file is being written all the time.
    """
    with opened(folder, anchor) as directory:
        return _Gathering(directory, document, before.kept if before else {}).run()


def set_digest(files: Mapping[str, str]) -> str:
    """The digest of a skill from those of its files, by their paths."""
    ordered = sorted(files.items(), key=lambda item: item[0].encode())
    lines = (f"{digest.removeprefix('sha256:')}  {path}\0" for path, digest in ordered)
    return digest_of("".join(lines).encode())


def digest_of(data: bytes) -> str:
    """The digest of a file's raw bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def kind_of(data: bytes) -> FileKind:
    """Whether a file is text: UTF-8 without NUL."""
    if b"\0" in data:
        return "binary"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "binary"
    return "text"


def is_utf8(path: str) -> bool:
    """Whether a path can be written in JSON and in a uri."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


class _OverTheLimit(Exception):
    """The skill has more than is offered; the message says of what."""


class _Gathering:
    """A walk through a skill, which is open as `directory`."""

    def __init__(self, directory: int, document: str, known: Mapping[str, Kept]) -> None:
        self._directory = directory
        self._document = document
        self._known = known
        self._left_out: list[Diagnostic] = []

    def run(self) -> Gathered:
        """Look at everything."""
        diagnostics: tuple[Diagnostic, ...] = ()
        try:
            kept = self._all()
        except _OverTheLimit as over:
            kept = {DOCUMENT: self._keep(self._document)}
            diagnostics = (problems.over_the_limit(str(over)),)
        files = tuple(kept[path].file for path in sorted(kept, key=str.encode))
        diagnostics += tuple(self._left_out[:_MAX_DIAGNOSTICS])
        digest = set_digest({file.path: file.digest for file in files})
        return Gathered(Contents(files, digest, diagnostics), kept)

    def _all(self) -> dict[str, Kept]:
        sizes = dict(self._files())
        if self._document not in sizes:
            raise FileNotFoundError(f"{self._document} is gone")
        if sum(sizes.values()) > MAX_BYTES:
            raise _OverTheLimit(f"{MAX_BYTES // 1024 // 1024} MiB of files")
        kept: dict[str, Kept] = {}
        for path in sizes:
            try:
                kept[self._public(path)] = self._keep(path)
            except (OSError, TooLarge) as exc:
                if path == self._document:
                    raise
                self._leave_out(path, getattr(exc, "strerror", None) or str(exc))
        if sum(each.file.size for each in kept.values()) > MAX_BYTES:
            raise _OverTheLimit(f"{MAX_BYTES // 1024 // 1024} MiB of files")
        return kept

    def _keep(self, path: str) -> Kept:
        known = self._known.get(self._public(path))
        if known is not None and known.settled:
            status = os.stat(path, dir_fd=self._directory, follow_symlinks=False)
            if stamp_of(status) == known.stamp:
                return known
        whole = read_whole(self._directory, path)
        kind = kind_of(whole.data)
        file = SkillFile(
            path=self._public(path),
            size=len(whole.data),
            digest=digest_of(whole.data),
            mime=mime_of(path, kind),
            kind=kind,
        )
        return Kept(whole.stamp, is_settled(whole.stamp, whole.read_at_ns), file)

    def _public(self, path: str) -> str:
        return DOCUMENT if path == self._document else path

    def _files(self) -> Iterator[tuple[str, int]]:
        pending = deque([""])
        files = entries = 0
        while pending:
            for path, status in self._listed(pending.popleft()):
                entries += 1
                if entries > _MAX_ENTRIES:
                    raise _OverTheLimit(f"{_MAX_ENTRIES:,} files and folders")
                if self._is_entered(path, status):
                    pending.append(path)
                elif self._is_offered(path, status):
                    files += 1
                    if files > MAX_FILES:
                        raise _OverTheLimit(f"{MAX_FILES} files")
                    yield path, status.st_size

    def _listed(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            directory = open_directory(self._directory, os.fsencode(folder or "."))
        except OSError as exc:
            self._leave_out(folder, os.strerror(exc.errno or 0))
            return
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield f"{folder}/{entry.name}" if folder else entry.name, status
        finally:
            os.close(directory)

    def _is_entered(self, path: str, status: os.stat_result) -> bool:
        if not stat.S_ISDIR(status.st_mode) or path.rsplit("/", 1)[-1] in JUNK_FOLDERS:
            return False
        if path.count("/") >= _MAX_DEPTH:
            self._leave_out(path, f"it lies more than {_MAX_DEPTH} deep")
            return False
        return True

    def _is_offered(self, path: str, status: os.stat_result) -> bool:
        name = path.rsplit("/", 1)[-1]
        if stat.S_ISDIR(status.st_mode) or is_junk_file(name):
            return False
        if not is_utf8(path):
            self._leave_out(path, "its name is not UTF-8")
        elif stat.S_ISLNK(status.st_mode):
            self._leave_out(path, "it is a symbolic link")
        elif not stat.S_ISREG(status.st_mode):
            self._leave_out(path, "it is not a regular file")
        else:
            return True
        return False

    def _leave_out(self, path: str, why: str) -> None:
        self._left_out.append(problems.left_out(path, why))
