"""Reads a `.zip` or `.skill` archive into a tree. The archive is hostile; its sizes are claims.

Refused: archives larger than any skill, zip64 (nothing that small needs it), overlapping entries,
encryption, other methods than stored and deflated, links and special files, rights beyond
reading, writing and running, and all that a `Tree` refuses. Archives inside are files like others.
"""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.files import MAX_BYTES
from mcp_sandbox.skills.supply.tree import Collector, Tree, is_junk, show, too_large

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
# What the library raises for archives that are not as they should be.
_DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    ValueError,
)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_archive(path: Path) -> Tree:
    """Return the files of an archive.

    Raises:
        SourceUnavailable: it cannot be read.
        UnusableSkill: it is damaged, or holds what no skill needs.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_ARCHIVE_BYTES + 1)
    except OSError as exc:
        raise SourceUnavailable(f"{path} cannot be read: {exc.strerror}") from exc
    return unpack(data)


def unpack(data: bytes) -> Tree:
    """Return the files of an archive that is in memory.

    Raises:
        UnusableSkill: it is damaged, or holds what no skill needs.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise too_large()
    _check_end(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_layout(data, entries, archive.start_dir)
            return _collect(archive, entries)
    except _DAMAGES as exc:
        raise UnusableSkill(f"the archive is damaged ({exc}): pack the skill again") from exc


def _check_end(data: bytes) -> None:
    """Bound the directory of the archive before it is parsed."""
    # The last mark counts, as for the library; a comment may follow it.
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


def _collect(archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]) -> Tree:
    collected = Collector()
    for entry in entries:
        name = entry.orig_filename
        if name.endswith("/") or is_junk(name):
            continue
        _check_entry(entry)
        collected.expect(name)
        data = b"".join(_bounded(archive, entry, collected.room))
        collected.add(name, data, executable=bool(entry.external_attr >> 16 & 0o111))
    return collected.tree()


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name, mode = show(entry.orig_filename), entry.external_attr >> 16
    if entry.flag_bits & _ENCRYPTED:
        raise UnusableSkill(f"{name} is encrypted: pack the skill without a password")
    if entry.compress_type not in _METHODS:
        raise UnusableSkill(f"{name} is packed by another method than deflate: use `zip -r`")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise UnusableSkill(f"{name} is a link or a special file: put a plain file there")
    if mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise UnusableSkill(f"{name} asks for rights of its owner: `chmod 755` it, and pack again")


def _bounded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, room: int) -> Iterator[bytes]:
    """Yield an entry's bytes, counted while they come."""
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
