"""A value is blotted out in each of its forms, however the bytes are cut, and nothing else is."""

import base64
import json
import os
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from urllib.parse import quote, quote_from_bytes, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.egress.process.mask import FILLER, Mask

TOKEN = "ghp_16C7e42F29~2c6912E7/+=8"
ODD = r"""p%41ss "w\o/rd' & <more> %2F"""
VALUES = [TOKEN, ODD, "aXaXaXaXaXaXaX", "%67%67abab%67%67", "??>>??>>??>>~~"]

FORMS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "json": lambda value: json.dumps(value)[1:-1],
    "json with slashes escaped": lambda value: json.dumps(value)[1:-1].replace("/", r"\/"),
    "json, all escaped": lambda value: "".join(rf"\u{ord(c):04x}" for c in value),
    "json, all in upper case": lambda value: "".join(rf"\u{ord(c):04X}" for c in value),
    "json, marks alone": lambda value: re.sub(r"\W", lambda c: rf"\u{ord(c[0]):04X}", value),
    "percent": quote,
    "percent, slashes too": lambda value: quote(value, safe=""),
    "percent, lower case": lambda value: re.sub(
        "%..", lambda c: c[0].lower(), quote_from_bytes(value.encode(), "")
    ),
    "percent, all": lambda value: "".join(f"%{ord(c):02X}" for c in value),
    "form": quote_plus,
}
DIGITS: dict[str, Callable[[bytes], bytes]] = {
    "standard": base64.b64encode,
    "url": base64.urlsafe_b64encode,
    "percent": lambda value: quote(base64.b64encode(value), safe="").encode(),
    "json": lambda value: base64.b64encode(value).replace(b"/", rb"\/"),
}


def in_pieces(mask: Mask, data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [*(mask.text(data[a:b], more=True) for a, b in pairwise(places)), mask.text(b"")]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_becomes_filler_and_what_is_around_it_stays(form: str, value: str) -> None:
    written = FORMS[form](value).encode()
    data = b'{"a": "' + written + b'", "b": "' + written + b'"}'
    filler = FILLER * len(written)
    expected = b'{"a": "' + filler + b'", "b": "' + filler + b'"}'
    mask = Mask([value.encode()])
    assert mask.text(data) == expected
    assert b"".join(in_pieces(mask, data, range(len(data)))) == expected


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("before", ["", "x", "xy", "user:"])
def test_base64_is_found_wherever_the_value_begins(before: str, digits: str, value: str) -> None:
    data = DIGITS[digits](f"{before}{value} and more".encode())
    out = Mask([value.encode()]).text(data)
    assert len(out) == len(data)
    # The digits at the ends of a value hold something of its neighbours.
    blotted = out.count(FILLER)
    assert blotted >= len(value) * 8 // 6 - 1
    assert out.startswith(data[: len(before) * 8 // 6])


def test_other_bytes_pass_at_once_and_only_a_beginning_waits() -> None:
    mask = Mask([TOKEN.encode()])
    assert mask.text(b"data: 50% of \\n\n\n", more=True) == b"data: 50% of \\n\n\n"
    assert mask.text(b"data: ghp_16", more=True) == b"data: "
    assert mask.text(b"none\n", more=True) == b"ghp_16none\n"
    assert mask.text(b"100%", more=True) == b"100"
    assert mask.text(b"") == b"%"


def test_a_mask_of_nothing_changes_nothing() -> None:
    data = os.urandom(10_000)
    assert b"".join(in_pieces(Mask([]), data, [100, 5000])) == data


def texts() -> st.SearchStrategy[bytes]:
    """Texts in which values, their parts and what looks like them follow each other."""
    whole = [form(value).encode() for value in VALUES for form in FORMS.values()]
    digits = [
        form(f"{before}{value}".encode())
        for value in VALUES
        for form in DIGITS.values()
        for before in ("", "x", "xy")
    ]
    parts = st.tuples(st.sampled_from(whole + digits), st.integers(0, 90), st.integers(0, 90))
    pieces = parts.map(lambda part: part[0][part[1] : part[1] + part[2]])
    small = st.sampled_from([b"%", b"\\", b"\\u00", b"67", b"aX", b"/", b" ", b"%6", b"\\x", b"gh"])
    return st.lists(pieces | small | st.sampled_from(whole + digits)).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(texts(), st.lists(st.integers(0, 600)), st.sampled_from([VALUES, *([v] for v in VALUES)]))
def test_any_pieces_give_what_the_whole_gives(
    data: bytes, cuts: list[int], values: list[str]
) -> None:
    mask = Mask([value.encode() for value in values])
    whole = mask.text(data)
    assert len(whole) == len(data)
    assert b"".join(in_pieces(mask, data, cuts)) == whole
    assert all(form(value).encode() not in whole for value in values for form in FORMS.values())


@settings(max_examples=200, deadline=None)
@given(texts(), st.lists(st.integers(0, 600)))
def test_never_more_is_kept_back_than_the_longest_form(data: bytes, cuts: list[int]) -> None:
    longest = 6 * max(len(base64.b64encode(value.encode())) for value in VALUES) + 6
    mask = Mask([value.encode() for value in VALUES])
    *pieces, _ = in_pieces(mask, data, cuts)
    fed = [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    told = [len(b"".join(pieces[: n + 1])) for n in range(len(pieces))]
    assert all(taken - out <= longest for taken, out in zip(fed, told, strict=True))
