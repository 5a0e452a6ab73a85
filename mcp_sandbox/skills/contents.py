r"""All files of a skill, with their digests; each is read whole or not at all. Blocking.

A skill's files are the regular files in its folder and below, also those of skills that lie in
it, and without what tools leave there. Links and special files are never opened and
are left out, with a diagnostic; so are names that are not UTF-8. A skill over a limit offers its
document only. The document is called SKILL.md here, however it is spelled on the disk.

The digest of a skill is that of the text which `sha256sum --zero` prints for its files in the
order of their paths' bytes:

    find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum -z | sha256sum
"""

import hashlib
import mimetypes
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from mcp_sandbox.durable import closing_fd
from mcp_sandbox.errors import Busy, TooLarge
from mcp_sandbox.skills.skill import (
    DOCUMENT,
    Contents,
    Diagnostic,
    FileKind,
    SkillFile,
    make_diagnostic,
)
from mcp_sandbox.workspace.beneath import open_directory, open_file

Stamp = tuple[int, int, int, int, int]
"""Device, inode, time of the last change of content, of anything, and bytes."""

# How far the clock of a file system may lag behind: a tick of the kernel, or two seconds where
# it stores whole seconds only.
_TICK_NS = 50_000_000
_WHOLE_SECONDS_NS = 2_000_000_000

MAX_BYTES = 16 * 1024 * 1024
"""The limit of all files of a skill together, and so of each."""
_ATTEMPTS = 3
JUNK_FOLDERS = frozenset(
    {".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox", ".nox",
     ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)  # fmt: skip
"""Folders that tools leave behind: no part of any skill, never searched."""
_FILES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", ".git"})
# Types that the standard library lacks, or names otherwise than skills mean them.
_MORE = {
    ".bash": "application/x-sh", ".cjs": "text/javascript", ".go": "text/x-go",
    ".ipynb": "application/x-ipynb+json", ".jsonl": "application/jsonl",
    ".jsx": "text/javascript", ".md": "text/markdown", ".mdx": "text/markdown",
    ".ps1": "text/x-powershell", ".rb": "text/x-ruby", ".rs": "text/x-rust",
    ".sql": "application/sql", ".toml": "application/toml", ".ts": "text/typescript",
    ".tsx": "text/typescript", ".ttf": "font/ttf", ".otf": "font/otf", ".woff": "font/woff",
    ".woff2": "font/woff2", ".xsd": "application/xml", ".yaml": "application/yaml",
    ".yml": "application/yaml",
}  # fmt: skip
# Not `mimetypes.guess_type`: its answers depend on files of the machine.
_TYPES = mimetypes.MimeTypes()
for _ending, _type in _MORE.items():
    _TYPES.add_type(_type, _ending)
_PACKED = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
_UNKNOWN: dict[FileKind, str] = {"text": "text/plain", "binary": "application/octet-stream"}
MAX_FILES = 512
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 16


class FileRead(NamedTuple):
    """A file's bytes, its stamp from before they were read, and whether edits would show in it."""

    data: bytes
    stamp: Stamp
    settled: bool


def read_whole(directory: int, path: str) -> FileRead:
    """Read a regular file beneath an open folder, following no link.

    A writer that pauses while it rewrites the file in place looks as if it had finished.

    Raises:
        OSError: there is none.
        TooLarge: it is over the limit.
        Busy: it changes all the time.
    """
    for _ in range(_ATTEMPTS):
        with closing_fd(open_file(directory, os.fsencode(path))) as file:
            now = time.time_ns()
            before = stamp_of(os.fstat(file))
            data = _all(file, path)
            # A stamp that is not settled may hide an edit, so the bytes must be the same twice.
            settled = is_settled(before, now)
            same = settled or _all(file, path) == data
            if same and stamp_of(os.fstat(file)) == before:
                return FileRead(data, before, settled)
    raise Busy(f"{path} keeps changing while it is read: try again when the writer has finished")


def _all(file: int, path: str) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    data = b""
    while len(data) <= MAX_BYTES and (chunk := os.read(file, 1 << 20)):
        data += chunk
    if len(data) > MAX_BYTES:
        raise TooLarge(f"{path} has more than {MAX_BYTES // 1024 // 1024} MiB: it is not offered")
    return data


def stamp_of(s: os.stat_result) -> Stamp:
    """Return the stamp of a file or folder; any edit changes it once it is settled."""
    return s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_size


def is_settled(stamp: Stamp, now_ns: int) -> bool:
    """Return whether a change after `now_ns` (since the epoch) would change the stamp.

    It would not if the last change is so recent that the next may get the same time.
    """
    changed = stamp[3]
    return changed + (_TICK_NS if changed % 1_000_000_000 else _WHOLE_SECONDS_NS) < now_ns


def is_junk_file(name: str) -> bool:
    """Return whether a file of that name is no part of a skill."""
    return name in _FILES or name.endswith((".pyc", ".pyo"))


def is_junk(path: str) -> bool:
    """Return whether a path, relative to a skill's folder, is or lies in what is no part of it."""
    *folders, name = path.split("/")
    return not JUNK_FOLDERS.isdisjoint((*folders, name)) or is_junk_file(name)


@contextmanager
def open_folder(folder: Path, anchor: Path | None) -> Iterator[int]:
    """Open a folder and yield its descriptor; follow no link below the anchor. Raises OSError."""
    with closing_fd(os.open(anchor or folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
        inside = os.fsencode(folder.relative_to(anchor or folder))
        with closing_fd(open_directory(top, inside)) as directory:
            yield directory


class CachedFile(NamedTuple):
    """A file as it was, and its stamp from before it was read."""

    stamp: Stamp
    settled: bool
    file: SkillFile


class SkillSnapshot(NamedTuple):
    """A skill's contents, and what is needed to see whether they are still the same."""

    contents: Contents
    cached: Mapping[str, CachedFile]


def gather(
    folder: Path,
    document: str = DOCUMENT,
    *,
    anchor: Path | None = None,
    before: SkillSnapshot | None = None,
) -> SkillSnapshot:
    """Return all files of a skill's folder; files unchanged since `before` are not read again.

    Below `anchor`, or the folder itself where there is none, no link is followed.

    Raises:
        OSError: the folder or its document cannot be read.
        TooLarge: the document alone is over the limit.
        Busy: a file is being written all the time.
    """
    with open_folder(folder, anchor) as directory:
        return _Gathering(directory, document, before.cached if before else {}).run()


def set_digest(files: Mapping[str, str]) -> str:
    """Return the digest of a skill, from the digests of its files by path."""
    ordered = sorted(files, key=str.encode)
    lines = (f"{files[path].removeprefix('sha256:')}  {path}\0" for path in ordered)
    return digest_of("".join(lines).encode())


def digest_of(data: bytes) -> str:
    """Return the digest of a file's raw bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def kind_of(data: bytes) -> FileKind:
    """Return whether a file is text: UTF-8 without NUL."""
    with suppress(UnicodeDecodeError):
        return "binary" if "\0" in data.decode() else "text"
    return "binary"


def is_utf8(path: str) -> bool:
    """Return whether a path can be written in JSON and in a uri."""
    return path.encode(errors="ignore").decode() == path


class _OverTheLimit(Exception):
    """The skill is over a limit; the message says which."""


class _Gathering:
    """A walk through a skill, which is open as `directory`."""

    def __init__(self, directory: int, document: str, known: Mapping[str, CachedFile]) -> None:
        self._directory = directory
        self._document = document
        self._known = known
        self._left_out: list[Diagnostic] = []

    def run(self) -> SkillSnapshot:
        diagnostics: tuple[Diagnostic, ...] = ()
        try:
            gathered = self._all()
        except _OverTheLimit as over:
            gathered = {DOCUMENT: self._keep(self._document)}
            diagnostics = (make_diagnostic("over-the-limit", what=over),)
        files = tuple(gathered[path].file for path in sorted(gathered, key=str.encode))
        diagnostics += tuple(self._left_out[:100])
        digest = set_digest({file.path: file.digest for file in files})
        return SkillSnapshot(Contents(files, digest, diagnostics), gathered)

    def _all(self) -> dict[str, CachedFile]:
        sizes = dict(self._files())
        if self._document not in sizes:
            raise FileNotFoundError(f"{self._document} is gone")
        if sum(sizes.values()) > MAX_BYTES:
            raise _OverTheLimit(f"{MAX_BYTES // 1024 // 1024} MiB of files")
        files: dict[str, CachedFile] = {}
        for path in sizes:
            try:
                files[self._public(path)] = self._keep(path)
            except (OSError, TooLarge) as exc:
                if path == self._document:
                    raise
                self._leave_out(path, getattr(exc, "strerror", None) or str(exc))
        return files

    def _keep(self, path: str) -> CachedFile:
        known = self._known.get(self._public(path))
        if known is not None and known.settled:
            status = os.stat(path, dir_fd=self._directory, follow_symlinks=False)
            if stamp_of(status) == known.stamp:
                return known
        whole = read_whole(self._directory, path)
        kind = kind_of(whole.data)
        # Only the suffix: `mimetypes` could take a whole name for a URL.
        guessed, packed = _TYPES.guess_type(f"file{PurePosixPath(path).suffix.lower()}")
        mime = guessed or _UNKNOWN[kind]
        if packed is not None:
            mime = _PACKED.get(packed, _UNKNOWN["binary"])
        file = SkillFile(self._public(path), len(whole.data), digest_of(whole.data), mime, kind)
        return CachedFile(whole.stamp, whole.settled, file)

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
                wanted = self._wanted(path, status)
                if wanted == "folder":
                    pending.append(path)
                elif wanted == "file":
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
        with closing_fd(directory), os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield f"{folder}/{entry.name}" if folder else entry.name, status

    def _wanted(self, path: str, status: os.stat_result) -> Literal["folder", "file"] | None:
        name, mode = path.rsplit("/", 1)[-1], status.st_mode
        is_folder = stat.S_ISDIR(mode)
        if (name in JUNK_FOLDERS) if is_folder else is_junk_file(name):
            return None
        if is_folder:
            if path.count("/") < _MAX_DEPTH:
                return "folder"
            why = f"it lies more than {_MAX_DEPTH} deep"
        elif not is_utf8(path):
            why = "its name is not UTF-8"
        elif stat.S_ISREG(mode):
            return "file"
        else:
            why = "it is a symbolic link" if stat.S_ISLNK(mode) else "it is not a regular file"
        self._leave_out(path, why)
        return None

    def _leave_out(self, path: str, why: str) -> None:
        self._left_out.append(make_diagnostic("left-out", path, why=why))
