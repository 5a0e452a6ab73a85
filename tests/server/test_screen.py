"""What a terminal shows, as text."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.server.screen import screen
from tests.server.real_screens import SENT

MOST = 32 * 1024


def test_a_screen_is_what_was_written_last_and_where() -> None:
    assert screen(b"one\r\ntwo  \r\n\x1b[1;5Hmore\r\n\n\nend\r\n") == "one more\ntwo\n\nend"
    assert screen(b"progress 10%\rprogress 99%\x1b[2D!\x1b[K") == "progress 9!"
    assert screen(b"") == screen(b"gone\x1b[2J") == ""


def test_what_has_scrolled_off_is_not_shown() -> None:
    lines = "".join(f"{number}\r\n" for number in range(1, 101)).encode()
    assert screen(lines).split("\n") == [str(number) for number in range(72, 101)]
    assert screen(lines, rows=3) == "99\n100"
    assert screen(b"x" * 15, columns=10) == "x" * 10 + "\n" + "x" * 5


def test_colours_titles_and_sequences_that_are_not_known_leave_no_trace() -> None:
    sent = (
        b"\x1b]0;a title\x07a\x1b[31m\x1b[4:3mb\x1b[?4m\x1b[>4;2mc\x1bP+q436f\x1b\\d\x1b[?2004h"
        b"\x1b[1;2;3;4Ae\x1b[9Kf\x1b[!pg\x1b[0%mh\xc2\x9bi\x1b[22;0;0t\x1b[=1cj\x1b]8;;x\x1b\\k"
    )
    assert screen(sent) == "abcdefghijk"


def test_wide_characters_marks_and_lines_are_drawn() -> None:
    assert screen("你好, e\u0301té 👍".encode()) == "你好, été 👍"
    assert screen("नमस्ते दुनिया".encode()) == "नमस्ते दुनिया"
    assert screen(b"\x1b(0lqk\r\nx x\x1b(B\r\nok") == "┌─┐\n│ │\nok"


def test_a_program_that_drew_on_a_page_of_its_own_leaves_nothing_of_it() -> None:
    drawing = b"$ vi\r\n\x1b[?1049h\x1b[H\x1b[2Jdrawn\r\n~"
    assert screen(drawing) == "drawn\n~"
    assert screen(drawing + b"\x1b[?1049l$ ") == "$"


@pytest.mark.parametrize(
    ("program", "beginning", "end"),
    [
        ("vim", "line 1 of the file\nhello\nline 2 of the file\n", "\n~\n-- INSERT --"),
        ("less", "line 4 of the file\nline 5 of the file\n", "\n~\n(END)"),
        ("top", "top - ", " sleep"),
    ],
)
def test_what_real_programs_draw_is_read(program: str, beginning: str, end: str) -> None:
    shown = screen(SENT[program])
    assert shown.startswith(beginning)
    assert shown.endswith(end)
    # As it is for a buffer that holds no more than the end.
    for start in range(0, len(SENT[program]), 37):
        assert "\x1b" not in screen(SENT[program][start:])


SLOW = [
    *(b"\x1b#8", b"\x1b#8\x1b[2J", b"\x1b[999999999b\x1b[999999999L\x1b[999999999@\x1b[999999999S"),
    *(b"a" + b"\xcc\x81" * 5000, b"\x1b[2G\xcc\x81", b"\x1b[4hx", b"\x1b[?5h\x1b#8", b"\n"),
    *(b"\x1b", b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b[:", b"\x1b[9", b"9", b"\x1b[H\x1bM", b"\x1b7"),
    *(b"\x1b[?3h", b"\x1b[?3l", b"\x1b[?1049h", b"\x1b[?1049l", b"\x1bc", b"\x9b", b"\xc2\x9d"),
]


@pytest.mark.parametrize("piece", SLOW)
@pytest.mark.parametrize("before", [b"", b"\x1b[4h\x1b#8"])
def test_no_input_takes_long(piece: bytes, before: bytes) -> None:
    started = time.thread_time()
    screen(before + piece * (10 * MOST // len(piece)))
    assert time.thread_time() - started < 1


def test_what_takes_too_long_to_draw_is_text_without_escape_sequences() -> None:
    sent = b"\x1b#8\x1b]0;title\x07" * 2000 + b"the end"
    assert screen(sent) == "the end"


parts = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=10).map(str.encode),
    st.from_regex(rb"\x1b[\[\]()#%P^_=>78DEHMc][?<=>0-9;:!$' ]{0,9}[@-~\x07]?", fullmatch=True),
)


@given(st.lists(parts, max_size=60).map(b"".join))
def test_random_bytes_give_a_screen_without_controls(data: bytes) -> None:
    shown = screen(data, columns=20, rows=5)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown if char != "\n")


def test_random_bytes_take_no_time() -> None:
    for _ in range(5):
        started = time.thread_time()
        screen(os.urandom(MOST))
        assert time.thread_time() - started < 1
