"""Dividing a document, and reading what is between the fences, whatever the bytes are."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.skills.front_matter import HEAD_BYTES, InvalidFrontMatter, read, split
from mcp_sandbox.skills.parse import of_body, parse

PIECES = (b"---", b"...", b"--", b"-", b"\n", b"\r", b"\r\n", b" ", b"\t", b"\xef\xbb\xbf", b"\0")
YAML = (b"a", b": ", b":", b"b: c\n", b"name: x\n", b"description: y\n", b"|\n", b">", b"'", b'"')
ODD = (b"[", b"]", b"{", b"}", b",", b"&a", b"*a", b"!t", b"? ", b"- ", b"#", b"\xc3\xa9", b"\xff")
HOSTILE = st.lists(st.sampled_from(PIECES + YAML + ODD), max_size=40).map(b"".join)
FENCED = HOSTILE.map(lambda data: b"---\n" + data + b"\n---\n")
DOCUMENTS = st.one_of(st.binary(max_size=300), HOSTILE, FENCED)


@given(DOCUMENTS)
def test_head_and_body_are_the_document(data: bytes) -> None:
    parts = split(data)
    assert parts.head + parts.body == data
    assert parts.yaml in parts.head
    assert (parts.missing is None) == bool(parts.head)


@given(DOCUMENTS, st.binary(max_size=50))
def test_the_body_does_not_change_where_the_head_ends(data: bytes, body: bytes) -> None:
    first = split(data)
    again = split(first.head)
    assert (again.head, again.yaml, again.body) == (first.head, first.yaml, b"")
    if first.head.endswith((b"\n", b"\r")):
        # A line feed after a carriage return belongs to the same end of a line.
        other = b"x" + body
        assert split(first.head + other).body == other or not first.head


@given(st.binary(max_size=200))
def test_a_body_comes_out_as_it_was(body: bytes) -> None:
    for end in (b"\n", b"\r\n"):
        head = end.join([b"---", b"name: a", b"---", b""])
        assert split(head + body).body == body


@given(DOCUMENTS, st.text(max_size=20))
def test_whatever_is_read_is_used_or_has_an_error_and_can_be_sent(data: bytes, folder: str) -> None:
    parsed = parse(data, folder)
    errors = [each for each in parsed.diagnostics if each.level == "error"]
    assert (parsed.front is None) == bool(errors)
    assert all(each.reason and each.fix for each in parsed.diagnostics)
    assert all(each.line is None or each.line >= 1 for each in parsed.diagnostics)
    if parsed.front is not None:
        assert json.loads(json.dumps(parsed.front.fields, allow_nan=False)) == parsed.front.fields
        json.dumps(parsed.front.name, ensure_ascii=False).encode()


@given(FENCED)
def test_the_beginning_is_enough_where_the_rest_is_body(data: bytes) -> None:
    whole = data + b"x" * HEAD_BYTES
    assert parse(whole[:HEAD_BYTES], "x", size=len(whole)) == parse(whole, "x")


def test_fields_named_like_arguments_of_the_library_are_fields_like_others() -> None:
    fields = read(split(b"---\nname: a\ncontent: {a: b}\nhandler: c\nmetadata: d\n---\n"))
    assert fields.values == {"name": "a", "content": {"a": "b"}, "handler": "c", "metadata": "d"}
    assert fields.lines == {"name": 2, "content": 3, "handler": 4, "metadata": 5}


def test_front_matter_that_goes_on_after_the_beginning_is_too_long() -> None:
    data = b"---\nname: a\n" + b"x: y\n" * 50_000
    (found,) = parse(data[:HEAD_BYTES], "a", size=len(data)).diagnostics
    assert found.code == "front-matter-too-long"
    (found,) = parse(data, "a").diagnostics
    assert found.code == "unclosed"


@pytest.mark.parametrize(
    ("source", "code", "line"),
    [
        ("a: &x b\nc: [*x]\n", "alias", 2),
        ("a: b\nc: *x\n", "alias", 2),
        ("a: !!str b\n", "tag", 1),
        ("a: b\n\na: c\n", "duplicate-key", 3),
        ("a: 'b'\n'a': c\n", "duplicate-key", 2),
        ("? [a]\n: b\n", "key", 1),
        ("a: b\n\tc: d\n", "yaml", 2),
        ("a: b\nc: \x07\n", "control-character", 2),
        ("- a\n", "not-a-mapping", 1),
    ],
)
def test_what_is_not_read_is_named_with_its_line(source: str, code: str, line: int) -> None:
    with pytest.raises(InvalidFrontMatter) as caught:
        read(split(b"\n" * 9 + f"---\n{source}---\n".encode()))
    assert (caught.value.diagnostic.code, caught.value.diagnostic.line) == (code, line + 10)


@pytest.mark.parametrize(
    "data",
    [
        b"-" * 1_000_000,
        b"---\n" + b"-" * 1_000_000,
        b"---\n" * 250_000,
        b"---" + b" " * 1_000_000 + b"x",
        b"---\n" + b"--- x\n" * 150_000,
        b"\r\n" * 500_000 + b"x",
        b" " * 1_000_000,
        (b" " * 1_000 + b"\n") * 1_000,
        b"---\n" + b"...\n" * 250_000,
        b"---\n" + (b"---" + b" " * 100 + b"x\n") * 10_000,
        b"---\ndescription: " + b"<a" * 8_000 + b"\n---\n",
        b"---\ndescription: 'x'\nallowed-tools: " + b"(" * 16_000 + b"\n---\n",
        b"---\n" + b"a: 'b' c\n" * 1_700 + b"---\n",
        b"---\n" + b"a: [b] c\n" * 1_700 + b"---\n",
        b"---\nx: y: z\n" + b"".join(b"k%d: [b]\n" % each for each in range(1_200)) + b"---\n",
        b"---\na: " + b"[" * 16_000 + b"\n---\n",
        b"---\na: " + b"{a: " * 4_000 + b"\n---\n",
        b"---\na: " + b"? " * 8_000 + b"\n---\n",
        b"---\na: " + b"- " * 8_000 + b"\n---\n",
        b'---\na: "' + b"\\" * 16_000 + b"\n---\n",
        b"---\na: b: " + b"'" * 16_000 + b"\n---\n",
        b"---\nname: x\ndescription: |\n" + b" " * 15_000 + b"\n---\n",
        b"---\nname: " + b"-" * 15_000 + b"\ndescription: D.\n---\n",
    ],
    ids=range(23),
)
def test_no_document_keeps_the_reader_busy(data: bytes) -> None:
    began = time.thread_time()
    parse(data, "skill")
    assert time.thread_time() - began < 0.3


def test_a_body_is_judged_by_its_length_and_its_characters() -> None:
    body = b"text\n" * 501 + "hid\u200bden\n".encode() + b"\x1b[2J\n\xff"
    found = {each.code: each.line for each in of_body(body, first_line=5)}
    assert found == {
        "body-too-long": None,
        "not-utf-8": 508,
        "control-character": 507,
        "hidden-character": 506,
    }
    assert list(of_body(b"# Title\n\n\ttext\r\n")) == []
