import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.server.text import (
    clean_output,
    count_bytes,
    shorten,
    show,
    show_name,
    without_internals,
)


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
    assert count_bytes(cut.head) + count_bytes(cut.tail) <= limit
    (cut.head + cut.tail).encode()
    if not cut.left_out:
        assert cut.head == show(text)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\r 1%\r 50%\r100%\r\n", "100%\n"),
        ("a\r\nb\r\r\n\r\nc", "a\nb\n\nc"),
        ("50%\r", "50%"),
        ("50%\r   \rdone\nnext", "done\nnext"),
        ("long text\rab\n", "long text\nab\n"),
        ("name,qty\rapples,10\rpears,5\r", "name,qty\napples,10\npears,5"),
        ("ERROR: disk\r   \n", "ERROR: disk\n"),
        ("abcdef\rXY", "abcdef\nXY"),
        ("ERROR: disk\r   \rOK\r\n12345\rXY", "ERROR: disk\nOK\n12345\nXY"),
        ("10 s left\r9 s left\r     \rdone    \r", "9 s left\ndone    "),
        (
            "\r⠋ Load\r\x1b[36m⠙ Load 9\x1b[m\r\x1b[2m\x1b[Kok\n|#  |\x1b[2K\x1b[1G|## |",
            "ok\n|## |",
        ),
        ("copied (2/9)\x1b[Gcopied (9/9), done.\n", "copied (9/9), done.\n"),
        ("\x1b[1;38;5;196mred\x1b[0m\x1b[K \x1b[?25lplain\x1b(B\x1b[m", "red plain"),
        ("\x1b[2K\x1b[1G\x1b[38:2::1:2:3mx", "x"),
        ("\x1b]0;title\x07\x1bc\x08\x00", "␀"),
        ("\x1b]8;;https://a.example\x1b\\link\x1b]8;;\x1b\\ \x1b]2;t\x1b\\x", "link x"),
        ("\x1b]133;A\x07$ \x1b)0\x1b7\x1b8\x1b=\x1b>", "$ "),
        ("\x1b]0;no end\nx", "␛]0;no end\nx"),
        ("N\bNA\bAME _\bu \b\b|\b/\b-\b100%", "NAME 100%"),
        ("\bwait...\b\b\b done\nab\b\b\b\bc", "wait done\ncb"),
        ("shown\b\b\b\b\b\nrm -rf x\b\rok", "shown\nrm -rf x\nok"),
        (
            "a\n(node:7) [UNDICI-EHPA] Warning: EnvHttpProxyAgent is experimental.\n"
            "(Use `node --trace-warnings ...` to show where the warning was created)\nb",
            "a\nb",
        ),
        ("cut \x1b[3", "cut "),
    ],
)
def test_what_was_printed_is_shown_as_a_terminal_leaves_it(text: str, seen: str) -> None:
    assert clean_output(text) == seen


@pytest.mark.parametrize(
    "piece",
    [
        "\r",
        "\x1b",
        "\x1b[",
        "\x1b[;",
        "a\r",
        "a\b",
        "\b",
        "\x1b]",
        "\x1b]8;;",
        "\r\x1b[m",
        "\x1b[G",
        "\x1b[ ",
        "(node:1) [UNDICI-EHPA]",
        " ",
        "node:a:1\n",
        " at node:",
        ":1",
        "\nNode.js v",
    ],
)
def test_hostile_output_is_shown_in_no_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    began = time.process_time()
    without_internals(clean_output(text))
    without_internals(clean_output(f"{piece[0]}{'0' * 100_000}"))
    assert time.process_time() - began < 1


def test_an_error_of_node_is_shown_without_its_internals() -> None:
    told = (
        "node:internal/modules/cjs/loader:1143\n  throw err;\n  ^\n\n"
        "Error: Cannot find module 'x'\n    at f (/workspace/[eval1]:1:1)\n"
        "    at node:internal/main:1:2\n"
        "    at require (node:internal/modules/helpers:177:18) {\n  code: 'MODULE_NOT_FOUND'\n}\n"
        "\nNode.js v18.20.4\n"
    )
    assert without_internals(told) == (
        "Error: Cannot find module 'x'\n    at f (/workspace/[eval1]:1:1)\n"
        "{\n  code: 'MODULE_NOT_FOUND'\n}\n"
    )
    told = "  at node: the beginning\nnode:1\nNode.js v18 is old\n"
    assert without_internals(f"look{told}") == f"look{told}"
