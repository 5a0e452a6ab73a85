import json
import time
from typing import Any

import anyio
import pytest
from anyio.abc import ByteReceiveStream
from anyio.streams.buffered import BufferedByteReceiveStream
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.server.transports import MAX_LINE_BYTES, Overlong, find_request_id, read_line


class Chunks(ByteReceiveStream):
    """A byte stream that delivers the given chunks."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = iter(chunks)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise anyio.EndOfStream
        return chunk

    async def aclose(self) -> None:
        """Nothing is open."""


async def lines_of(chunks: list[bytes], max_bytes: int = 100) -> list[bytes | Overlong]:
    stream = BufferedByteReceiveStream(Chunks(chunks))
    found = []
    while (line := await read_line(stream, max_bytes)) is not None:
        found.append(line)
    return found


async def test_lines_are_found_across_chunks_and_blank_ones_skipped() -> None:
    assert await lines_of([b"a", b"b\n\n \r\nc", b"\nd\ne"]) == [b"ab", b"c", b"d"]


async def test_an_overlong_line_is_dropped_and_the_next_one_read() -> None:
    found = await lines_of([b"x" * 60, b"x" * 60, b"y" * 500, b"z\nnext\n"])
    assert found == [Overlong(b"x" * 120, 621), b"next"]


async def test_an_overlong_line_is_not_kept() -> None:
    stream = BufferedByteReceiveStream(Chunks([b"x" * 65536] * 2000))
    assert await read_line(stream, 1_000_000) is None
    assert len(stream.buffer) <= 1_000_000 + 65536


@given(st.dictionaries(st.text(), st.recursive(st.text() | st.integers(), st.lists, max_leaves=5)))
def test_the_id_of_any_request_is_found(params: dict[str, Any]) -> None:
    before = json.dumps({"params": params, "id": 5, "method": "x"}).encode()
    assert find_request_id(before) == 5
    after = json.dumps({"id": 'a"b', "params": params}).encode()
    assert find_request_id(after) == 'a"b'


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b'{"id":null}', b'{"id":{}}', b'{"a":{"id":1}}', b'{"a":"id","b":1}', b'{"id":"'],
)
def test_no_id_is_made_up(line: bytes) -> None:
    assert find_request_id(line) is None


@pytest.mark.parametrize("part", [b"0,", b'""', b"[", b"-", b"x", b" ", b'\\"', b"1"])
def test_looking_for_an_id_holds_up_nobody(part: bytes) -> None:
    line = b'{"a":[' + part * (MAX_LINE_BYTES // 2 // len(part))
    began = time.process_time()
    find_request_id(line)
    assert time.process_time() - began < 2


def test_looking_for_an_id_takes_linear_time() -> None:
    began = time.monotonic()
    find_request_id(b'{"a' + b'\\"' * 5_000_000)
    find_request_id(b'"' * 3_000_001)
    assert time.monotonic() - began < 20
