"""Lines of a stream come out whole, however it is cut, and one without an end takes no memory."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.agents.events import MAX_LINE, LineDecoder, Notice


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\n", b"a\nb\n", b"\r\n"])))
def test_lines_are_the_same_however_they_are_cut(pieces: list[bytes]) -> None:
    lines = LineDecoder()
    came = [line for piece in [*pieces, b"\n"] for line in lines.feed(piece)]
    assert came == [line for line in b"".join(pieces).split(b"\n") if line.strip()]


def test_a_line_that_is_too_long_is_dropped_and_the_next_is_there() -> None:
    lines, piece = LineDecoder(), b"x" * (1 << 20)
    tracemalloc.start()
    came = [line for _ in range(100) for line in lines.feed(piece)]
    came += lines.feed(b"\nnext\n")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert came == [Notice("left out: line of over 32 MiB (number 1)"), b"next"]
    assert most < 80 << 20


def test_the_longest_line_comes_whole() -> None:
    lines = LineDecoder()
    assert list(lines.feed(b"x" * MAX_LINE)) == []
    assert list(lines.feed(b"\n")) == [b"x" * MAX_LINE]
