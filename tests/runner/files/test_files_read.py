import os
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.runner.files.bench import call, refused


def test_bytes_come_back_as_they_are(workspace: Path) -> None:
    data = os.urandom(3_000_000)
    (workspace / "blob").write_bytes(data)
    assert call("read", path="blob") == ({"size": len(data), "sent": len(data)}, data)


def test_a_part_of_a_file_is_read(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"0123456789")
    assert call("read", path="f", offset=3, length=4)[1] == b"3456"
    assert call("read", path="f", offset=8, length=100) == ({"size": 10, "sent": 2}, b"89")
    assert call("read", path="f", offset=50) == ({"size": 10, "sent": 0}, b"")


def test_a_file_of_proc_without_a_size_is_read(workspace: Path) -> None:
    assert b"Name:" in call("read", path="/proc/self/status")[1]


def test_a_file_over_the_callers_limit_is_refused_before_it_is_sent(workspace: Path) -> None:
    (workspace / "big").touch()
    os.truncate(workspace / "big", 10 * 2**30)
    error = refused("read", path="big", max_bytes=1000)
    assert error.code == "too_large"
    assert "offset" in error.message


def test_a_part_of_a_ten_gigabyte_sparse_file_is_read_at_once(workspace: Path) -> None:
    (workspace / "big").touch()
    os.truncate(workspace / "big", 10 * 2**30)
    result, body = call("read", path="big", offset=9 * 2**30, length=1000)
    assert result == {"size": 10 * 2**30, "sent": 1000}
    assert body == bytes(1000)
    assert call("read_lines", path="big")[0]["kind"] == "binary"


def test_lines_are_counted_from_one(workspace: Path) -> None:
    (workspace / "f").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    result, body = call("read_lines", path="f", offset=10, limit=3)
    assert body == b"line 10\nline 11\nline 12\n"
    assert result == {
        "path": "f",
        "kind": "text",
        "mime": "text/plain",
        "size": 792,
        "first_line": 10,
        "lines": 3,
        "total_lines": 100,
        "more": True,
        "long_lines_cut": 0,
        "encoding": "",
    }


def test_an_empty_file_has_no_lines(workspace: Path) -> None:
    (workspace / "f").touch()
    result, body = call("read_lines", path="f")
    assert (result["kind"], result["lines"], result["total_lines"], body) == ("text", 0, 0, b"")


def test_a_last_line_without_newline_is_a_line(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\nb")
    result, body = call("read_lines", path="f")
    assert (result["lines"], result["total_lines"], result["more"], body) == (2, 2, False, b"a\nb")


@pytest.mark.parametrize("content", [b"a\nb\n", b"a\nb"])
def test_an_offset_past_the_end_tells_how_many_lines_there_are(
    workspace: Path, content: bytes
) -> None:
    (workspace / "f").write_bytes(content)
    error = refused("read_lines", path="f", offset=3)
    assert error.code == "invalid"
    assert "has 2 lines" in error.message
    assert call("read_lines", path="f", offset=2)[0]["lines"] == 1


def test_long_lines_are_cut_and_counted(workspace: Path) -> None:
    (workspace / "f").write_text("é" * 5000 + "\nshort\n")
    result, body = call("read_lines", path="f")
    assert body.decode() == "é" * 2000 + "\nshort\n"
    assert result["long_lines_cut"] == 1


def test_a_result_ends_at_the_byte_limit_with_whole_lines(workspace: Path) -> None:
    (workspace / "f").write_text("123456789\n" * 100)
    result, body = call("read_lines", path="f", max_bytes=55)
    assert body == b"123456789\n" * 5
    assert (result["lines"], result["more"], result["total_lines"]) == (5, True, 100)
    assert call("read_lines", path="f", max_bytes=1)[0]["lines"] == 1


def test_carriage_returns_and_a_byte_order_mark_are_not_shown(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert call("read_lines", path="f")[1] == b"a\nb\n"


RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю.\n"
CHINESE = "使用说明 请先安装程序 然后打开设置 选择语言。\n"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("naïve café\n".encode("latin-1"), "WINDOWS-1252"),
        (b"a\ncaf\xe9", "WINDOWS-1252"),
        ("Grüße, “quoted”\r\n".encode("cp1252"), "WINDOWS-1252"),
        (f"name = 1  # {RUSSIAN}total = 2\n".encode("koi8-r") * 2 + b"x" * 200, "KOI8-R"),
        (f"name = 1  # {RUSSIAN}total = 2\n".encode("cp1251") * 2 + b"x" * 200, "WINDOWS-1251"),
        (f"name = 1  # {CHINESE}total = 2\n".encode("gbk") + b"x" * 200, "GB18030"),
        ("naïve café\n".encode() * 3 + b"stray \xe9\n", "UTF-8"),
        ("naïve café 文書 👍\n".encode(), ""),
        (b"only ASCII\n", ""),
        (b"", ""),
    ],
)
def test_of_text_that_is_not_utf_8_the_encoding_is_guessed(
    workspace: Path, data: bytes, encoding: str
) -> None:
    (workspace / "f").write_bytes(data)
    result, body = call("read_lines", path="f")
    assert (result["kind"], result["encoding"]) == ("text", encoding)
    lines = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
    assert body.decode() == lines


def test_lines_that_differ_in_bytes_that_are_not_utf_8_look_different(workspace: Path) -> None:
    (workspace / "f").write_bytes("café\ncafè\nplain\n".encode("latin-1"))
    assert (
        call("read_lines", path="f")[1]
        == rb"""caf\xe9
caf\xe8
plain
"""
    )


def test_the_encoding_is_told_with_each_part_that_shows_such_a_line(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"plain\n" * 10 + b"caf\xe9\n" + b"plain\n" * 10 + b"\xe0\n")
    told = {
        at: call("read_lines", path="f", offset=at, limit=2)[0]["encoding"] for at in range(1, 21)
    }
    assert [at for at, encoding in told.items() if encoding] == [10, 11]
    assert call("read_lines", path="f", offset=22)[0]["encoding"] == "WINDOWS-1252"


def test_a_stray_byte_in_ten_megabytes_of_utf_8_is_called_no_other_encoding(
    workspace: Path,
) -> None:
    (workspace / "f").write_bytes("naïve\n".encode() * 1_500_000 + b"stray \xe9\n" + b"plain\n")
    assert call("read_lines", path="f", limit=100)[0]["encoding"] == ""
    result, body = call("read_lines", path="f", offset=1_500_001)
    assert (result["encoding"], body) == ("UTF-8", b"stray \\xe9\nplain\n")
    count, _ = call("edit", "plainüber".encode(), path="f", old_bytes=5)
    assert count["replacements"] == 1


def test_a_line_is_not_called_odd_because_it_was_cut_within_a_character(workspace: Path) -> None:
    for start in ("", "\ufeff", "a", "ab", "abc"):
        (workspace / "f").write_text(start + "👍" * 5000 + "\n")
        result, body = call("read_lines", path="f")
        assert (result["encoding"], result["long_lines_cut"]) == ("", 1)
        assert len(body.decode().removesuffix("\n")) == 2000
        assert "\\" not in body.decode()


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (RUSSIAN.encode("koi8-r") * 20, "KOI8-R"),
        (RUSSIAN.encode("cp1251") * 20, "WINDOWS-1251"),
        (CHINESE.encode("gbk") * 400, "GB18030"),
        ("Grüße".encode("utf-16"), "UTF-16"),
        ("Grüße".encode("utf-16-le"), ""),
        (os.urandom(64 * 1024), ""),
        (bytes(range(1, 256)), ""),
        (b"%PDF-1.4\nxref", ""),
    ],
)
def test_what_is_hardly_ascii_is_described_with_its_encoding_if_it_may_be_text(
    workspace: Path, data: bytes, encoding: str
) -> None:
    (workspace / "f").write_bytes(data)
    result, body = call("read_lines", path="f")
    assert (result["kind"], result["encoding"], body) == ("binary", encoding, data[:256])


def test_other_data_comes_as_its_first_bytes(workspace: Path) -> None:
    data = bytes(range(256)) * 4
    (workspace / "f").write_bytes(data)
    result, body = call("read_lines", path="f")
    assert (result["kind"], result["mime"]) == ("binary", "application/octet-stream")
    assert body == data[:256]


@pytest.mark.parametrize(
    ("head", "mime"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
    ],
)
def test_images_come_whole_up_to_what_models_take(workspace: Path, head: bytes, mime: str) -> None:
    (workspace / "small").write_bytes(head + bytes(1000))
    result, body = call("read_lines", path="small")
    assert (result["kind"], result["mime"], len(body)) == ("image", mime, len(head) + 1000)
    (workspace / "large").write_bytes(head + bytes(3_500_000))
    result, body = call("read_lines", path="large")
    assert (result["kind"], result["mime"], len(body)) == ("binary", mime, 256)


@pytest.mark.parametrize(
    "head", [b"%PDF-1.4\nxref", "Grüße 文書".encode("utf-16"), b"\xfe\xff\x65\x87"]
)
def test_what_only_looks_like_text_is_none(workspace: Path, head: bytes) -> None:
    (workspace / "f").write_bytes(head)
    result, body = call("read_lines", path="f")
    assert (result["kind"], body) == ("binary", head)


def test_paging_deep_into_a_large_file_is_quick_and_takes_no_memory(workspace: Path) -> None:
    block = b"".join(b"line %07d\n" % n for n in range(100_000))
    with open(workspace / "log", "wb") as file:
        for _ in range(200):
            file.write(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    result, body = call("read_lines", path="log", offset=19_950_001, limit=2)
    took = time.monotonic() - started
    assert body == b"line 0050000\nline 0050001\n"
    assert result["total_lines"] == 20_000_000
    assert call("read_lines", path="log", limit=1)[0]["total_lines"] is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
    assert took < 5


def test_a_line_of_two_hundred_megabytes_takes_no_memory(workspace: Path) -> None:
    with open(workspace / "log", "wb") as file:
        for _ in range(200):
            file.write(b"x" * 2**20)
        file.write(b"\nend\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result, body = call("read_lines", path="log")
    assert body == b"x" * 2000 + b"\nend\n"
    assert (result["long_lines_cut"], result["total_lines"]) == (1, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


@pytest.mark.parametrize("op", ["read", "read_lines"])
def test_only_regular_files_are_read(workspace: Path, op: str) -> None:
    os.mkfifo(workspace / "fifo")
    (workspace / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "sock"))
        for name, kind in [("fifo", "fifo"), ("sock", "socket"), ("/dev/zero", "device")]:
            error = refused(op, path=name)
            assert error.code == "wrong_kind"
            assert f"is a {kind}" in error.message
    assert "list_files" in refused(op, path="folder").message


def test_missing_files_and_link_loops_are_told_apart(workspace: Path) -> None:
    (workspace / "a").symlink_to("b")
    (workspace / "b").symlink_to("a")
    (workspace / "file").touch()
    assert refused("read", path="nothing").code == "not_found"
    assert refused("read", path="a").code == "invalid"
    assert refused("read", path="file/below").code == "wrong_kind"
    assert refused("read", path="x" * 300).code == "invalid"


def test_a_missing_file_tells_what_is_there_instead(workspace: Path) -> None:
    (workspace / "src").mkdir()
    (workspace / "src/README.md").touch()
    (workspace / "dangling").symlink_to("nothing")
    assert "did you mean README.md?" in refused("read", path="src/readme.md").message
    assert "did you mean README.md?" in refused("read", path="src/REDME.md").message
    assert "list_files" in refused("read", path="src/other").message
    assert f"{workspace} is there, but has no lib" in refused("read", path="lib/a/b").message
    assert "link whose target" in refused("read", path="dangling").message


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "x/" * 3000, None, 7])
def test_unusable_paths_are_refused(workspace: Path, path: object) -> None:
    assert refused("read", path=path).code == "invalid"


@pytest.mark.parametrize("value", [-1, True, 1.5, "1", 2**63])
def test_numbers_out_of_range_are_refused(workspace: Path, value: object) -> None:
    (workspace / "f").touch()
    assert refused("read", path="f", offset=value).code == "invalid"


def test_paths_are_under_the_workspace_the_home_or_anywhere(workspace: Path) -> None:
    (workspace / "f").write_text("w")
    (workspace.parent / "home" / "f").write_text("h")
    assert call("read", path="f")[1] == b"w"
    assert call("read", path="~/f")[1] == b"h"
    assert call("read", path=str(workspace / "f"))[1] == b"w"
    assert call("read_lines", path=str(workspace / "f"))[0]["path"] == "f"
    assert call("read_lines", path="~/f")[0]["path"] == str(workspace.parent / "home" / "f")


def test_dots_after_a_link_mean_what_the_kernel_means(workspace: Path) -> None:
    (workspace.parent / "home" / "sub").mkdir()
    (workspace.parent / "home" / "f").write_text("beside the link's target")
    (workspace / "f").write_text("beside the link")
    (workspace / "link").symlink_to(workspace.parent / "home" / "sub")
    assert call("read", path="link/../f")[1] == b"beside the link's target"


def test_odd_names_are_shown_safely_and_may_be_given_as_shown(workspace: Path) -> None:
    odd = os.fsencode(str(workspace)) + b"/a\n\xff\x1b[31m\xe2\x80\xaeb"
    with open(odd, "wb") as file:
        file.write(b"found")
    shown = r"a\x0a\xff\x1b[31m\xe2\x80\xaeb"
    assert call("read_lines", path=os.fsdecode(odd))[0]["path"] == shown
    assert call("read", path=shown)[1] == b"found"
    assert call("read", path="a\n\udcff\x1b[31m\u202eb")[1] == b"found"
    assert "\n" not in refused("read", path="no\nsuch\x1b").message


@pytest.mark.parametrize(
    ("there", "given"),
    [
        ("cafe\u0301.txt", "caf\u00e9.txt"),
        ("caf\u00e9.txt", "cafe\u0301.txt"),
        ("Screenshot 3.04\u202fPM.png", "Screenshot 3.04 PM.png"),
        ("r\u00e9sum\u00e9s/a\u00a0b/f", "re\u0301sume\u0301s/a b/f"),
        ("it\u2019s \u201cnew\u201d.md", 'it\'s "new".md'),
        ("e\u2011mail.txt", "e-mail.txt"),
        ("\uac01.txt", "\u1100\u1161\u11a8.txt"),
    ],
)
def test_the_only_name_that_looks_like_the_given_one_is_meant(
    workspace: Path, there: str, given: str
) -> None:
    (workspace / there).parent.mkdir(parents=True, exist_ok=True)
    (workspace / there).write_text("old\n")
    assert call("read", path=given)[1] == b"old\n"
    call("edit", b"oldnew", path=given, old_bytes=3)
    call("write", b"more\n", path=given, append=True)
    assert (workspace / there).read_text() == "new\nmore\n"
    # It can still be given the other name.
    call("move", source=there, destination=given)
    assert (workspace / given).read_text() == "new\nmore\n"
    assert not (workspace / there).exists()


def test_of_names_that_look_alike_the_characters_are_named(workspace: Path) -> None:
    for name in ("a\u00a0b.txt", "a\u202fb.txt", "p\u0430ypal.txt"):
        (workspace / name).touch()
    told = refused("read", path="a b.txt").message
    assert "a\u00a0b.txt (with U+00A0 NO-BREAK SPACE instead of U+0020 SPACE)" in told
    assert "a\u202fb.txt (with U+202F NARROW NO-BREAK SPACE instead of U+0020 SPACE)" in told
    told = refused("read", path="paypal.txt").message
    assert "with U+0430 CYRILLIC SMALL LETTER A instead of U+0061 LATIN SMALL LETTER A" in told
    # The exact name comes first, and a new file is one.
    (workspace / "a b.txt").write_text("plain")
    assert call("read", path="a b.txt")[1] == b"plain"
