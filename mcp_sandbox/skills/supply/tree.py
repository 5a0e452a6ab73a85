"""All files of one skill, in memory. Whatever a source says, a `Tree` is small and harmless.

A name that could mean another place, or mean two files on another file system, is refused and
not repaired: an honest author can rename the file, and an attacker gains nothing.

Archives (`.zip` or `.skill`) are untrusted, and so are the sizes they state. Refused are archives
larger than any skill, zip64 (nothing that small needs it), overlapping entries, encryption, other
methods than stored and deflated, links and special files, and rights beyond reading, writing and
running. Archives inside are files like others.
"""

import errno
import io
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from unicodedata import category, normalize

from mcp_sandbox.durable import closing_fd
from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills import contents
from mcp_sandbox.skills.contents import MAX_BYTES, MAX_FILES
from mcp_sandbox.skills.skill import is_document
from mcp_sandbox.workspace import beneath

_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255
_MAX_DEPTH = 16
# Entries of a folder looked at, junk included.
_MAX_ENTRIES = 20_000
_DRIVE = re.compile(r"[A-Za-z]:")
_UNSEEN = frozenset({"Cc", "Cs", "Cf"})
SUFFIXES = (".zip", ".skill")
MAX_ARCHIVE_BYTES = MAX_BYTES + (4 << 20)
# Folders are entries too, and so is what macOS adds.
MAX_ENTRIES = 2048
_MAX_RATIO = 200
_RATIO_COUNTS_FROM = 1 << 20
_CHUNK = 1 << 16
_END = b"PK\x05\x06"
_END_SIZE = 22
_ZIP64_LOCATOR = b"PK\x06\x07"
_LOCAL_SIZE = 30
_ENCRYPTED = 0x1 | 0x40
# What `zipfile` raises for damaged archives.
_DAMAGES = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, OverflowError,
    RuntimeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A regular file: its bytes, and whether it may be run as a program."""

    data: bytes
    executable: bool = False


Tree = Mapping[str, SourceFile]
"""Path in the skill's folder, with slashes -> file."""


class Collector:
    """Gathers the files of a source one by one and stops at the first that is too much."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}
        # Folded -> as it is spelled, and whether it is a folder.
        self._names: dict[str, tuple[str, bool]] = {}
        # How many further bytes there may be.
        self.room = MAX_BYTES

    def add(self, path: str, data: bytes, *, executable: bool) -> None:
        """Take a file.

        Raises UnusableSkill: the name is not safe or taken, also where upper and lower case are the
        same, or it is one file too many or too large.
        """
        check_path(path)
        if len(self._files) >= MAX_FILES:
            raise UnusableSkill(
                f"the skill has more than {MAX_FILES} files: leave out what it does not need"
            )
        if path in self._files:
            raise UnusableSkill(f"{show(path)} is there twice: keep one of them")
        for place in (path, *map(str, PurePosixPath(path).parents[:-1])):
            folded = normalize("NFKC", normalize("NFKC", place).casefold())
            spelled, is_folder = self._names.setdefault(folded, (place, place != path))
            if spelled != place:
                raise UnusableSkill(
                    f"{show(spelled)} and {show(place)} are the same name on some file systems: "
                    "rename one of them"
                )
            if is_folder != (place != path):
                raise UnusableSkill(f"{show(place)} is both a file and a folder: rename one")
        if len(data) > self.room:
            raise too_large()
        self.room -= len(data)
        self._files[path] = SourceFile(data, executable)

    def tree(self) -> Tree:
        return dict(sorted(self._files.items()))


def check_path(path: str) -> None:
    """Raise UnusableSkill for a path that is not plainly one file beneath the skill's folder."""
    parts = path.split("/")
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    problems = {
        "is absolute or empty": not path or path.startswith("/") or bool(_DRIVE.match(path)),
        "has a backslash in it": "\\" in path,
        "goes through '.', '..' or an empty name": not {"", ".", ".."}.isdisjoint(parts),
        "has characters that cannot be seen": not _UNSEEN.isdisjoint(map(category, path)),
        f"is longer than {_MAX_PATH_BYTES} bytes or deeper than {_MAX_DEPTH} folders": (
            sum(sizes) + len(parts) - 1 > _MAX_PATH_BYTES or len(parts) > _MAX_DEPTH
        ),
        f"has a part of more than {_MAX_NAME_BYTES} bytes": max(sizes) > _MAX_NAME_BYTES,
    }
    for problem, holds in problems.items():
        if holds:
            what = f"the file name {show(path)} {problem}"
            raise UnusableSkill(f"{what}: rename the file in its source")


def is_junk(path: str) -> bool:
    """Say whether a path is no part of the skill: what version control and systems leave."""
    return contents.is_junk(path) or path.startswith("__MACOSX/")


def too_large() -> UnusableSkill:
    """Return the error for more bytes than a skill may have."""
    return UnusableSkill(
        f"the skill is larger than {MAX_BYTES >> 20} MiB: leave out what it does not need"
    )


def show(text: str, length: int = 120) -> str:
    """Return a hostile text for a message: quoted, escaped and not long."""
    readable = ascii(text)
    return readable if len(readable) <= length else f"{readable[:length]}…'"


def documents(paths: Iterable[str]) -> list[str]:
    """Return the paths that are a `SKILL.md` in any spelling, those higher up first."""
    found = [path for path in paths if is_document(path.rsplit("/", 1)[-1])]
    return sorted(found, key=lambda path: (path.count("/"), path))


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
    collected = Collector()
    try:
        with closing_fd(root):
            for file in _files_below(root):
                _take(root, file, collected)
    except OSError as exc:
        raise SourceUnavailable(
            f"{path} cannot be read ({exc.strerror}: {show(str(exc.filename or ''))}): make "
            "all its files readable, and try again"
        ) from exc
    return collected.tree()


def _files_below(root: int) -> Iterator[str]:
    pending, looked_at = [""], 0
    while pending:
        folder = pending.pop()
        directory = beneath.open_directory(root, os.fsencode(folder or "."))
        with closing_fd(directory), os.scandir(directory) as entries:
            found = sorted((each.name, each.is_dir(follow_symlinks=False)) for each in entries)
        for name, is_folder in found:
            looked_at += 1
            if looked_at > _MAX_ENTRIES:
                raise UnusableSkill(
                    f"the folder has more than {_MAX_ENTRIES} entries: name one skill"
                )
            path = f"{folder}/{name}" if folder else name
            if is_junk(f"{path}/_" if is_folder else path):
                continue
            if is_folder:
                check_path(path)
                pending.append(path)
            else:
                yield path


def _take(root: int, path: str, collected: Collector) -> None:
    try:
        file = beneath.open_file(root, os.fsencode(path))
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EXDEV):
            raise UnusableSkill(
                f"{show(path)} is a link or a special file: put a plain file there"
            ) from exc
        raise
    with os.fdopen(file, "rb") as stream:
        mode = os.fstat(file).st_mode
        data = stream.read(collected.room + 1)
    collected.add(path, data, executable=bool(mode & stat.S_IXUSR))


def read_archive(path: Path) -> Tree:
    """Return the files of an archive.

    Raises:
        SourceUnavailable: it cannot be read.
        UnusableSkill: it is damaged, or holds what no skill needs.
    """
    try:
        with path.open("rb") as stream:
            return unpack(stream.read(MAX_ARCHIVE_BYTES + 1))
    except OSError as exc:
        raise SourceUnavailable(f"{path} cannot be read: {exc.strerror}") from exc


def unpack(data: bytes) -> Tree:
    """Return the files of an archive that is in memory.

    Raises UnusableSkill: it is damaged, or holds what no skill needs.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise too_large()
    _check_end(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_layout(data, archive.infolist(), archive.start_dir)
            collected = Collector()
            for entry in archive.infolist():
                name = entry.orig_filename
                if name.endswith("/") or is_junk(name):
                    continue
                _check_entry(entry)
                read = b"".join(_read_bounded(archive, entry, collected.room))
                collected.add(name, read, executable=bool(entry.external_attr >> 16 & 0o111))
            return collected.tree()
    except _DAMAGES as exc:
        raise UnusableSkill(f"the archive is damaged ({exc}): pack the skill again") from exc


def _check_end(data: bytes) -> None:
    """Bound the directory of the archive before it is parsed."""
    # The last mark counts, as it does for `zipfile`; a comment may follow it.
    at = data.rfind(_END, max(0, len(data) - _END_SIZE - 0xFFFF))
    if at < 0 or len(data) < at + _END_SIZE:
        raise UnusableSkill("this is no zip archive: pack the skill's folder with `zip -r`")
    disk, first_disk, here, total, size, offset = struct.unpack("<4HII", data[at + 4 : at + 20])
    if _ZIP64_LOCATOR in data[max(0, at - 20) : at] or 0xFFFF in (here, total) or size > len(data):
        raise UnusableSkill("zip64 archives are not accepted: pack the skill again with `zip -r`")
    if disk or first_disk or here != total or offset > at:
        raise UnusableSkill("the archive is one part of several, or damaged: pack the skill again")
    if total > MAX_ENTRIES:
        raise UnusableSkill(f"the archive has {total} entries: a skill has 512 files at most")


def _check_layout(data: bytes, entries: Sequence[zipfile.ZipInfo], directory_at: int) -> None:
    """Refuse entries that share bytes: that is how a small archive becomes a large one."""
    reached = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        start = entry.header_offset
        if start < reached:
            raise UnusableSkill("entries of the archive overlap: pack the skill again")
        header = data[start : start + _LOCAL_SIZE]
        if len(header) < _LOCAL_SIZE:
            raise UnusableSkill("the archive is damaged (cut entry): pack the skill again")
        name_size, extra_size = struct.unpack("<HH", header[26:30])
        reached = start + _LOCAL_SIZE + name_size + extra_size + entry.compress_size
    if reached > directory_at:
        raise UnusableSkill("entries of the archive overlap: pack the skill again")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name, mode = show(entry.orig_filename), entry.external_attr >> 16
    if entry.flag_bits & _ENCRYPTED:
        raise UnusableSkill(f"{name} is encrypted: pack the skill without a password")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnusableSkill(f"{name} is packed by another method than deflate: use `zip -r`")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise UnusableSkill(f"{name} is a link or a special file: put a plain file there")
    if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise UnusableSkill(f"{name} asks for rights of its owner: `chmod 755` it, and pack again")


def _read_bounded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, room: int) -> Iterator[bytes]:
    limit = max(_RATIO_COUNTS_FROM, entry.compress_size * _MAX_RATIO)
    seen = 0
    with archive.open(entry) as stream:
        while chunk := stream.read(_CHUNK):
            seen += len(chunk)
            if seen > room:
                raise too_large()
            if seen > limit:
                raise UnusableSkill(
                    f"{show(entry.orig_filename)} unpacks to over {_MAX_RATIO} times its size: "
                    "leave it out"
                )
            yield chunk
    if seen != entry.file_size:
        raise UnusableSkill("the archive is damaged (cut entry): pack the skill again")
