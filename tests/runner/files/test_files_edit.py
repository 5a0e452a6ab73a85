import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.runner.files.bench import call, leftovers, refused


def edit(path: str, old: str | bytes, new: str | bytes, **args: bool) -> tuple[int, str]:
    """Edit a file; returns the number of replacements and the diff."""
    before, after = (x.encode() if isinstance(x, str) else x for x in (old, new))
    result, diff = call("edit", before + after, path=path, old_bytes=len(before), **args)
    assert result["diff_bytes"] == len(diff)
    assert result["path"] == path
    return result["replacements"], diff.decode()


def edit_refused(path: str, old: str, new: str = "new", **args: bool) -> tuple[str, str]:
    error = refused("edit", (old + new).encode(), path=path, old_bytes=len(old.encode()), **args)
    return error.code, error.message


def test_text_is_replaced_and_the_diff_says_where(workspace: Path) -> None:
    (workspace / "f").write_text("".join(f"line {n}\n" for n in range(1, 21)))
    (workspace / "f").chmod(0o755)
    count, diff = edit("f", "line 10\nline 11\n", "line 10\nchanged\nadded\n")
    assert count == 1
    assert diff == (
        "--- f\n+++ f\n@@ -8,7 +8,8 @@\n line 8\n line 9\n line 10\n-line 11\n+changed\n+added\n"
        " line 12\n line 13\n line 14\n"
    )
    assert (workspace / "f").read_text().splitlines()[9:12] == ["line 10", "changed", "added"]
    assert (workspace / "f").stat().st_mode & 0o777 == 0o755
    assert leftovers(workspace) == []


def test_all_places_are_replaced_on_request(workspace: Path) -> None:
    (workspace / "f").write_text("a\n" * 3 + "b\n" * 20 + "a\n")
    count, diff = edit("f", "a", "z", replace_all=True)
    assert count == 4
    assert diff.count(" @@\n") == 2
    assert (workspace / "f").read_text() == "z\n" * 3 + "b\n" * 20 + "z\n"


def test_a_dry_run_shows_the_diff_and_changes_nothing(workspace: Path) -> None:
    (workspace / "f").write_text("old\n")
    count, diff = edit("f", "old", "new", dry_run=True)
    assert (count, diff) == (1, "--- f\n+++ f\n@@ -1 +1 @@\n-old\n+new\n")
    assert (workspace / "f").read_text() == "old\n"


def test_windows_line_endings_stay(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\nthree\r\n")
    edit("f", "one\ntwo\n", "1\n2\n2b\n")
    assert (workspace / "f").read_bytes() == b"\xef\xbb\xbf1\r\n2\r\n2b\r\nthree\r\n"
    edit("f", "three", "3\n4")
    assert (workspace / "f").read_bytes().endswith(b"2b\r\n3\r\n4\r\n")


def test_mixed_line_endings_stay_where_they_are(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\r\nb\r\nc\nd\n")
    edit("f", "a\nb\n", "A\nB\n")
    edit("f", "c\nd\n", "C\nD\n")
    assert (workspace / "f").read_bytes() == b"A\r\nB\r\nC\nD\n"


def test_given_windows_endings_match_a_unix_file(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\nb\n")
    edit("f", "a\r\nb", "x\r\ny")
    assert (workspace / "f").read_bytes() == b"x\ny\n"


def test_bytes_that_are_not_text_stay(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"x\xff\xfe caf\xe9 = 1\n\x00\n")
    edit("f", " = 1", " = 2")
    edit("f", b"\xff\xfe", b"\xfe")
    edit("f", "x", "ü")
    assert (workspace / "f").read_bytes() == "ü".encode() + b"\xfe caf\xe9 = 2\n\x00\n"


LATIN = b"a = 1  # caf\xe9\r\nb = 2  # caf\xe8\r\n"


def test_ascii_is_edited_in_a_file_of_another_encoding_and_the_diff_shows_the_bytes(
    workspace: Path,
) -> None:
    (workspace / "f").write_bytes(LATIN)
    _, diff = edit("f", "a = 1  # ", "a = 3\nc = 1  # ")
    assert diff.splitlines()[3:] == [
        *(r"-a = 1  # caf\xe9", "+a = 3", r"+c = 1  # caf\xe9", r" b = 2  # caf\xe8"),
    ]
    assert (workspace / "f").read_bytes() == LATIN.replace(b"a = 1", b"a = 3\r\nc = 1")
    # Bytes may be put there, and what was mixed by others can be mended.
    edit("f", b"c = 1", b"\xe9 = 1")
    (workspace / "f").write_bytes(LATIN + "é".encode())
    edit("f", "é", "e")
    assert (workspace / "f").read_bytes() == LATIN + b"e"


@pytest.mark.parametrize(
    ("data", "old", "new", "words"),
    [
        (LATIN, "a = 1", "é = 1", "perhaps WINDOWS-1252.* iconv -f WINDOWS-1252 -t UTF-8"),
        (LATIN, "café", "cafe", "perhaps WINDOWS-1252.* iconv -f WINDOWS-1252 -t UTF-8"),
        (LATIN, r"a = 1  # caf\xe9", "a", r"the \\xNN that stand for bytes which are not UTF-8"),
        (LATIN, "\\xe9\nb = 2", "a", r"the \\xNN that stand for bytes which are not UTF-8"),
        (LATIN, "a = 2  # caf", "a", r"nearest.*\\xe9"),
        ("Привет всем".encode("koi8-r"), "x", "é", "perhaps KOI8-R"),
        ("a = 1\n".encode("utf-16"), "a", "b", "perhaps UTF-16.* iconv -f UTF-16 -t UTF-8"),
        ("a = 1\n".encode("utf-16"), "a = 1", "", "perhaps UTF-16.* iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_an_edit_that_would_mix_encodings_is_refused_with_the_way_out(
    workspace: Path, data: bytes, old: str, new: str, words: str
) -> None:
    (workspace / "f").write_bytes(data)
    for dry_run in (True, False):
        assert re.search(f"(?s){words}", edit_refused("f", old, new, dry_run=dry_run)[1])
    assert (workspace / "f").read_bytes() == data


def test_a_file_that_is_mostly_utf_8_is_edited_as_such(workspace: Path) -> None:
    (workspace / "f").write_bytes("naïve\n".encode() * 3 + b"stray \xe9\r\nlast\n")
    edit("f", "last", "über")
    edit("f", "naïve", "nève", replace_all=True)
    assert (workspace / "f").read_bytes() == "nève\n".encode() * 3 + b"stray \xe9\r\n\xc3\xbcber\n"


def test_a_missing_text_shows_the_nearest_lines(workspace: Path) -> None:
    (workspace / "f").write_text("def one():\n    return 1\n\ndef two():\n\treturn 2\n")
    code, message = edit_refused("f", "def two():\n    return 2\n")
    assert code == "no_match"
    assert "lines 4 to 5" in message
    assert "line 5 has U+0009 where old has U+0020 SPACE" in message
    assert "+      5  \\treturn 2" in message
    code, message = edit_refused("f", "def one(x):\n")
    assert "lines 1 to 1" in message
    assert "-         def one(x):" in message
    assert "nothing like it" in edit_refused("f", "zzzzzzzzzzzzzzz")[1]


def test_the_nearest_lines_of_a_large_file_are_found_in_bounded_time(workspace: Path) -> None:
    choose = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    lines = [" ".join(choose.choices(words, k=12)) for _ in range(60_000)]
    (workspace / "f").write_text("\n".join(lines))
    started = time.monotonic()
    code, message = edit_refused("f", lines[50].replace("alpha", "alfa") + " x")
    assert code == "no_match"
    assert len(message) < 8000
    assert time.monotonic() - started < 5


def test_an_ambiguous_text_tells_its_lines(workspace: Path) -> None:
    (workspace / "f").write_text("x = 1\ny\nx = 1\n" + "x = 1\n" * 30)
    code, message = edit_refused("f", "x = 1")
    assert code == "ambiguous"
    assert "lines 1, 3, 4, 5," in message
    assert "further ones" in message
    (workspace / "g").write_text("aaa")
    assert edit_refused("g", "aa")[0] == "ambiguous"


def test_senseless_edits_are_refused(workspace: Path) -> None:
    (workspace / "f").write_text("text")
    (workspace / "folder").mkdir()
    assert "write_file" in edit_refused("f", "")[1]
    assert "same" in edit_refused("f", "text", "text")[1]
    assert edit_refused("folder", "a")[0] == "wrong_kind"
    assert edit_refused("missing", "a")[0] == "not_found"
    assert refused("edit", b"ab", path="f", old_bytes=3).code == "invalid"
    os.truncate(workspace / "f", 33 * 2**20)
    assert edit_refused("f", "a")[0] == "too_large"


def test_an_edit_through_a_link_keeps_the_link(workspace: Path) -> None:
    (workspace / "target").write_text("old")
    (workspace / "link").symlink_to("target")
    edit("link", "old", "new")
    assert (workspace / "link").is_symlink()
    assert (workspace / "target").read_text() == "new"


def test_a_change_by_somebody_else_is_not_lost(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "f").write_text("old\n")
    fsync = os.fsync

    def interfere(fd: int) -> None:
        fsync(fd)
        (workspace / "f").write_text("old and theirs\n")

    monkeypatch.setattr(os, "fsync", interfere)
    code, message = edit_refused("f", "old")
    assert code == "no_match"
    assert "read it again" in message
    assert (workspace / "f").read_text() == "old and theirs\n"
    assert leftovers(workspace) == []


def test_a_long_diff_is_cut_with_a_note_but_the_edit_is_whole(workspace: Path) -> None:
    (workspace / "f").write_text("old line\n" * 50_000)
    count, diff = edit("f", "old", "new", replace_all=True)
    assert count == 50_000
    assert len(diff) <= 64 * 1024
    assert diff.endswith("the edit itself is whole\n")
    assert (workspace / "f").read_text() == "new line\n" * 50_000


@pytest.mark.parametrize("seed", range(20))
def test_the_diff_applied_by_patch_gives_the_new_file(workspace: Path, seed: int) -> None:
    choose = random.Random(seed)
    lines = [choose.choice(["a", "b", "c", "old", ""]) for _ in range(choose.randint(1, 60))]
    text = "\n".join(lines) + choose.choice(["", "\n"])
    (workspace / "f").write_text(text)
    (workspace / "copy").write_text(text)
    old = choose.choice(["old", "old\n", "a\nb", "\n\n", "c"])
    if old not in text:
        (workspace / "f").write_text(text + old)
        (workspace / "copy").write_text(text + old)
    _, diff = edit("f", old, choose.choice(["", "new", "new\n", "x\ny\nz"]), replace_all=True)
    subprocess.run(
        ["git", "apply", "--unidiff-zero", "-p0", "-"],
        input=diff.replace("--- f", "--- copy").replace("+++ f", "+++ copy").encode(),
        cwd=workspace,
        check=True,
        env={"GIT_CEILING_DIRECTORIES": "/", "PATH": os.environ["PATH"]},
    )
    assert (workspace / "copy").read_bytes() == (workspace / "f").read_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_line_ends_in_any_mixture_stay_those_of_the_file(workspace: Path, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(100):
        lines = [choose.choice("abc") * choose.randint(0, 2) for _ in range(choose.randint(1, 6))]
        content = "".join(line + choose.choice(["\n", "\r\n"]) for line in lines[:-1]) + lines[-1]
        plain = content.replace("\r\n", "\n")
        begin = choose.randint(0, len(plain))
        old = plain[begin : choose.randint(begin, len(plain))]
        new = "".join(choose.choices("ab\nx", k=choose.randint(0, 5)))
        if not old or old == new or plain.count(old) != 1 or plain.rfind(old) != plain.find(old):
            continue
        (workspace / "f").write_bytes(content.encode())
        edit("f", old, new)
        after = (workspace / "f").read_bytes().decode()
        assert after.replace("\r\n", "\n") == plain.replace(old, new)
        if content == plain or plain.count("\n") == content.count("\r\n"):
            assert after.count("\r\n") == (after.count("\n") if content != plain else 0)


def test_a_given_carriage_return_is_meant(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\r\nb\nc\r\n")
    edit("f", "b\n", "b\r\n")
    assert (workspace / "f").read_bytes() == b"a\r\nb\r\nc\r\n"
    edit("f", "\r", "", replace_all=True)
    assert (workspace / "f").read_bytes() == b"a\nb\nc\n"


def test_no_carriage_return_is_doubled(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\r\nb\r\nc\r\n")
    edit("f", "\nb", "\r\nB")
    assert (workspace / "f").read_bytes() == b"a\r\nB\r\nc\r\n"


def test_a_last_newline_stays_that_is_there(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"foo\n")
    assert edit_refused("f", "foo\n\n", "q\n")[0] == "no_match"


def test_the_newline_that_is_not_there_is_no_change(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"a\nb")
    assert "same" in edit_refused("f", "b\n", "b")[1]
    assert edit_refused("f", "a\n\n", "c")[0] == "no_match"
    (workspace / "f").write_bytes(b"a")
    assert edit_refused("f", "\n", "c")[0] == "no_match"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["a" * 200, "ab" * 100, "", "x = 1", "é" * 90])
def test_a_hostile_file_is_searched_in_bounded_time(workspace: Path, line: str) -> None:
    (workspace / "f").write_text(f"{line}\n" * (2**21 // (len(line) + 1)))
    started = time.monotonic()
    edit_refused("f", f"{line[1:]}b\n" * 300)
    assert time.monotonic() - started < 5
