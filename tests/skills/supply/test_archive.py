"""Archives are unpacked into memory, and only when they are plainly one skill."""

import io
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import MAX_BYTES, MAX_FILES
from mcp_sandbox.skills.supply.tree import MAX_ARCHIVE_BYTES, read_archive, unpack
from tests.skills.supply import archives
from tests.skills.supply.archives import DOCUMENT, packed


def test_files_of_an_archive_come_with_their_bytes_and_right_to_run() -> None:
    data = archives.with_mode("pdf/scripts/run.sh", stat.S_IFREG | 0o755, b"#!/bin/sh\n")
    tree = unpack(data)
    assert {path: file.data for path, file in tree.items()} == {
        "pdf/SKILL.md": DOCUMENT,
        "pdf/scripts/run.sh": b"#!/bin/sh\n",
    }
    assert [path for path, file in tree.items() if file.executable] == ["pdf/scripts/run.sh"]


def test_what_systems_leave_behind_is_left_out() -> None:
    files = {"pdf/SKILL.md": DOCUMENT, "__MACOSX/pdf/._SKILL.md": b"x", "pdf/.DS_Store": b"x"}
    assert list(unpack(packed({**files, "pdf/": b""}))) == ["pdf/SKILL.md"]


def test_archive_in_an_archive_is_a_file_like_others() -> None:
    inner = packed({"a": bytes(1 << 20)})
    assert unpack(packed({"pdf/SKILL.md": DOCUMENT, "pdf/x.zip": inner}))["pdf/x.zip"].data == inner


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/etc/passwd", "absolute"),
        ("../x", "'..'"),
        ("pdf/../../x", "'..'"),
        ("pdf//x", "empty name"),
        ("pdf/./x", "'.'"),
        ("pdf\\..\\x", "backslash"),
        ("C:/x", "absolute"),
        ("c:x", "absolute"),
        ("pdf/a\nb", "cannot be seen"),
        ("pdf/\u202egnp.exe", "cannot be seen"),
        ("pdf/" + "a" * 256, "255 bytes"),
        ("d/" * 17 + "x", "deeper"),
    ],
)
def test_name_that_could_mean_another_place_is_refused(name: str, says: str) -> None:
    with pytest.raises(UnusableSkill, match=says):
        unpack(packed({"pdf/SKILL.md": DOCUMENT, name: b"x"}))


def test_name_with_a_nul_byte_is_refused() -> None:
    data = packed({"pdf/SKILL.md": DOCUMENT, "pdf/x.py_.md": b"x"})
    with pytest.raises(UnusableSkill, match="cannot be seen"):
        unpack(data.replace(b"x.py_.md", b"x.py\0.md"))


@pytest.mark.parametrize(
    ("one", "other"),
    [("pdf/a.md", "pdf/A.md"), ("pdf/\u00e9", "pdf/e\u0301"), ("pdf/ﬁ", "pdf/fi"), ("p/x", "P/y")],
)
def test_names_that_some_file_systems_take_for_one_are_refused(one: str, other: str) -> None:
    with pytest.raises(UnusableSkill, match="same name on some file systems"):
        unpack(packed({one: b"1", other: b"2"}))


def test_a_file_that_is_a_folder_too_is_refused() -> None:
    with pytest.raises(UnusableSkill, match="both a file and a folder"):
        unpack(packed({"pdf/a": b"1", "pdf/a/b": b"2"}))
    with pytest.raises(UnusableSkill, match="both a file and a folder"):
        unpack(packed({"pdf/a/b": b"1", "pdf/a": b"2"}))


def test_the_same_name_twice_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pdf/a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("pdf/a", b"2")
    with pytest.raises(UnusableSkill, match="there twice"):
        unpack(buffer.getvalue())


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK])
def test_link_or_special_file_is_refused(kind: int) -> None:
    with pytest.raises(UnusableSkill, match="link or a special file"):
        unpack(archives.with_mode("pdf/x", kind | 0o777, b"/etc/passwd"))


@pytest.mark.parametrize("right", [stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX])
def test_file_that_asks_for_its_owners_rights_is_refused(right: int) -> None:
    with pytest.raises(UnusableSkill, match="rights of its owner"):
        unpack(archives.with_mode("pdf/x", stat.S_IFREG | right | 0o755))


def test_one_file_too_many_is_refused() -> None:
    files = {f"pdf/{number}": b"" for number in range(MAX_FILES)}
    assert len(unpack(packed(files))) == MAX_FILES
    with pytest.raises(UnusableSkill, match=f"more than {MAX_FILES} files"):
        unpack(packed({**files, "pdf/more": b""}))


def test_one_byte_too_many_is_refused() -> None:
    files = {"pdf/a": bytes(MAX_BYTES // 2), "pdf/b": bytes(MAX_BYTES // 2)}
    whole = packed(files, zipfile.ZIP_STORED)
    assert sum(len(file.data) for file in unpack(whole).values()) == MAX_BYTES
    with pytest.raises(UnusableSkill, match="larger than 16 MiB"):
        unpack(packed({**files, "pdf/c": b"x"}, zipfile.ZIP_STORED))


def test_archive_larger_than_any_skill_is_not_even_parsed(tmp_path: Path) -> None:
    file = tmp_path / "large.zip"
    with file.open("wb") as stream:
        stream.truncate(MAX_ARCHIVE_BYTES + 1)
    with pytest.raises(UnusableSkill, match="larger than 16 MiB"):
        read_archive(file)


def test_bomb_is_refused_while_it_unpacks() -> None:
    with pytest.raises(UnusableSkill, match="200 times its size"):
        unpack(packed({"pdf/bomb": bytes(15 << 20)}))


def test_entries_that_share_their_bytes_are_refused() -> None:
    with pytest.raises(UnusableSkill, match="overlap"):
        unpack(archives.quoted_bomb())


@pytest.mark.parametrize(("claimed", "real"), [(10, 1 << 20), (1 << 30, 10)])
def test_size_that_is_a_lie_is_refused(claimed: int, real: int) -> None:
    with pytest.raises(UnusableSkill, match="damaged"):
        unpack(archives.lying_about_size(claimed, real))


def test_archive_for_very_large_files_is_refused() -> None:
    with pytest.raises(UnusableSkill, match="zip64"):
        unpack(archives.zip64())


def test_encrypted_entry_is_refused() -> None:
    data = bytearray(packed({"pdf/SKILL.md": DOCUMENT}))
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + offset] |= 1
    with pytest.raises(UnusableSkill, match="without a password"):
        unpack(bytes(data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_methods_are_refused(method: int) -> None:
    with pytest.raises(UnusableSkill, match="deflate"):
        unpack(packed({"pdf/SKILL.md": DOCUMENT}, method))


def test_thousands_of_entries_are_refused_before_they_are_read() -> None:
    files = {f"{number}/": b"" for number in range(3000)}
    with pytest.raises(UnusableSkill, match="3000 entries"):
        unpack(packed(files))


@pytest.mark.parametrize("data", [b"", b"PK", b"x" * 100, b"PK\5\6"])
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(UnusableSkill, match="no zip archive"):
        unpack(data)


def test_cut_or_flipped_archive_is_refused_and_never_read_wrongly() -> None:
    whole = packed({"pdf/SKILL.md": DOCUMENT, "pdf/a": b"hello" * 50})
    good = unpack(whole)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 0xFF
        for data in (whole[:at], bytes(flipped)):
            try:
                tree = unpack(data)
            except UnusableSkill:
                continue
            # Times and rights are not checked by anything; bytes are.
            assert {f.data for f in tree.values()} <= {f.data for f in good.values()}


def test_names_that_cannot_be_names_are_refused() -> None:
    nameless = bytearray(packed({"pdf/SKILL.md": DOCUMENT}))
    at = nameless.index(b"PK\1\2")
    nameless[at + 28 : at + 32] = struct.pack("<HH", 0, len("pdf/SKILL.md"))
    with pytest.raises(UnusableSkill):
        unpack(bytes(nameless))
    not_text = packed({"pdf/é": b"x"}).replace("é".encode(), b"\xc3(")
    with pytest.raises(UnusableSkill, match="damaged"):
        unpack(not_text)


def test_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"none\.zip cannot be read: No such file"):
        read_archive(tmp_path / "none.zip")
