from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.server.text import byte_length, shorten, show, show_name


def test_escape_sequences_are_shown_not_sent() -> None:
    assert show("\x1b[31mred\x1b]52;c;AAAA\x07") == "␛[31mred␛]52;c;AAAA␇"
    assert show("a\x00b\x7f\x9bc") == "a␀b␡\\x9bc"


def test_newlines_and_tabs_stay_and_crlf_becomes_a_newline() -> None:
    assert show("a\tb\r\nc\nd\re") == "a\tb\nc\nd␍e"


def test_lone_surrogates_and_direction_marks_become_visible() -> None:
    assert show("\udc80 \u202eabc \u2066") == "\\udc80 \\u202eabc \\u2066"
    assert show("\u200e \u200f \u061c") == "\\u200e \\u200f \\u061c"


def test_a_name_stays_on_one_line() -> None:
    assert show_name("a\n[exit code 0]\t\r\nb") == "a␊[exit code 0]␉␍␊b"


def test_short_text_is_not_cut() -> None:
    cut = shorten("abc\n", 4)
    assert (cut.head, cut.tail, cut.left_out) == ("abc\n", "", 0)


def test_long_text_keeps_head_and_tail_at_line_ends() -> None:
    text = "".join(f"line {number}\n" for number in range(1, 1001))
    cut = shorten(text, 100)
    assert cut.head.endswith("\n")
    assert cut.tail.startswith("line ")
    assert cut.tail.endswith("line 1000\n")
    assert cut.head == "".join(f"line {number}\n" for number in range(1, cut.next_line))
    assert cut.left_out == len(text) - len(cut.head) - len(cut.tail)


@given(st.text(st.characters()), st.integers(min_value=4, max_value=200))
def test_shown_and_shortened_text_fits_and_can_be_sent(text: str, limit: int) -> None:
    cut = shorten(show(text), limit)
    assert byte_length(cut.head) + byte_length(cut.tail) <= limit
    (cut.head + cut.tail).encode()
    if not cut.left_out:
        assert cut.head == show(text)
