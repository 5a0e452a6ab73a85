"""What the relay knows of a line, however it is cut and however long it is."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.relay.copying import (
    LONGEST_READ_WHOLE,
    LineBuffer,
    Message,
    TooLong,
    outline,
    parse_messages,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40) | st.just('{"\\[' * 400),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)
FIELDS = st.dictionaries(st.sampled_from(["params", "result", "error", "x"]), VALUES, max_size=3)


@given(data=st.binary(max_size=60).map(lambda d: d.replace(b"a", b"\n")), at=st.integers(0, 60))
def test_lines_come_whole_wherever_the_bytes_are_cut(data: bytes, at: int) -> None:
    lines = LineBuffer(1000)
    whole = lines.feed(data[:at]) + lines.feed(data[at:])
    assert whole == data[: data.rfind(b"\n") + 1]


def test_a_line_that_is_too_long_can_be_cut_and_its_rest_is_dropped() -> None:
    lines = LineBuffer(8)
    assert lines.feed(b"one\n12345") == b"one\n"
    with pytest.raises(TooLong):
        lines.feed(b"6789")
    assert lines.cut_short() == b"123456789\n"
    assert lines.feed(b"still the same line") == b""
    assert lines.feed(b" and its end\ntwo\nthr") == b"two\n"
    assert lines.feed(b"ee\n") == b"three\n"


@given(fields=FIELDS, number=st.integers() | st.text(max_size=30), before=st.booleans())
def test_an_outline_has_the_same_names_and_id_as_the_whole(
    fields: dict[str, Any], number: int | str, before: bool
) -> None:
    message = {"id": number, **fields} if before else {**fields, "id": number}
    for text in (json.dumps(message), json.dumps(message, ensure_ascii=False, indent=1)):
        short = json.loads(outline(text.encode("utf-8", "surrogatepass")))
        assert short["id"] == number
        assert short.keys() == message.keys()


@pytest.mark.parametrize("size", [10, 2 * LONGEST_READ_WHOLE])
@pytest.mark.parametrize("number", [5, "five", '"\\'])
def test_id_and_method_are_found_before_and_behind_much(size: int, number: int | str) -> None:
    params = {"name": "write_file", "arguments": {"content": '"id": 9}\\' * size}}
    for message in (
        {"id": number, "method": "tools/call", "params": params},
        {"params": params, "method": "tools/call", "id": number},
    ):
        known = Message(json.dumps(message).encode() + b"\n")
        assert (known.id, known.method, known.is_request) == (number, "tools/call", True)


@pytest.mark.parametrize(
    ("line", "needs_server", "is_answer"),
    [
        (b'{"id":1,"method":"ping"}', True, False),
        (b'{"method":"notifications/x"}', False, False),
        (b'{"id":1,"result":{}}', False, True),
        (b'{"id":null,"error":{}}', False, True),
        (b'{"id":81,"method":5}', True, False),
        (b'{"id":81}', True, False),
        (b"[]", True, False),
        (b"not json", True, False),
        (b"\xff\xfe", True, False),
        (b"[" * 200_000, True, False),
        (b'{"a":' * 200_000, True, False),
        (b'"' + b"\\" * 200_001, True, False),
    ],
    ids=lambda value: f"{value[:30]!r}" if isinstance(value, bytes) else None,
)
def test_what_cannot_be_read_is_left_to_the_server(
    line: bytes, needs_server: bool, is_answer: bool
) -> None:
    message = Message(line + b"\n")
    assert (message.needs_server, message.is_answer) == (needs_server, is_answer)


def test_true_is_no_id_and_blank_lines_are_no_messages() -> None:
    assert Message(b'{"id":true,"method":"x"}').id is None
    assert parse_messages(b"\n  \r\n\n") == []


def test_start_of_the_relay_loads_nothing_slow() -> None:
    code = "import sys, mcp_sandbox.relay.connect; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"json", "re", "enum", "typing", "socket", "signal", "subprocess"}
    ours = {name for name in loaded if name.startswith("mcp_sandbox")}
    rooms = {"mcp_sandbox"} | {name for name in ours if name.startswith("mcp_sandbox.relay")}
    assert ours == rooms
