import random
import struct
import time
import zlib

import pytest

from mcp_sandbox.runner.files.reading import MAX_IMAGE
from mcp_sandbox.server.results import MAX_SIDE, inspect
from tests.server.real_pictures import REAL, png

MIMES = {"png": "image/png", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}


def fault(data: bytes) -> str:
    return inspect("a", data, len(data)).fault


@pytest.mark.parametrize("name", REAL)
def test_real_pictures_are_measured(name: str) -> None:
    data = REAL[name]
    assert inspect(name, data, len(data)) == (MIMES[name.rpartition(".")[2]], 16, 12, "")


@pytest.mark.parametrize("name", REAL)
def test_a_picture_cut_anywhere_is_refused(name: str) -> None:
    data = REAL[name].removesuffix(b"of a camera")
    assert [size for size in range(len(data)) if not fault(data[:size])] == []


def test_what_follows_the_end_of_a_picture_does_no_harm() -> None:
    assert [name for name, data in REAL.items() if fault(data + b"\0\xff\xd9 more")] == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"\xff\xd8\xff" + bytes(1000),
        b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(1000) + b"\xff\xd9",
        REAL["cmyk.jpg"][:-60] + bytes(60),
        REAL["palette.png"].replace(b"IDAT", b"IDAT" + bytes(4), 1),
        REAL["palette.png"][:40] + b"\xff" + REAL["palette.png"][41:],
        b"GIF89a\1\0\1\0\0\0\0\x3b",
        b"RIFF\x16\0\0\0WEBPXXXX" + bytes(14),
        png(0, 0),
    ],
)
def test_what_only_begins_like_a_picture_is_refused(data: bytes) -> None:
    assert fault(data)


def test_a_side_may_have_as_many_pixels_as_models_take() -> None:
    assert not fault(png(MAX_SIDE, 1))
    assert fault(png(20_000, 10)).startswith("over 8,000 pixels a side; for a smaller copy, ")
    assert "over 8,000" in fault(png(1, MAX_SIDE + 1))


def test_too_many_bytes_are_refused_by_the_beginning_alone() -> None:
    found = inspect("/project/it's.png", png(9, 9)[:50], MAX_IMAGE + 1)
    assert "over 3,500,000 bytes" in found.fault
    assert found.fault.endswith(" 'it'\"'\"'s.png.small.jpg'")


def test_damaged_pictures_never_break_the_reader() -> None:
    choose = random.Random(8)
    pictures = [*REAL.values(), png(5, 5)]
    for _ in range(100_000):
        data = bytearray(choose.choice(pictures))
        for _ in range(choose.randint(1, 5)):
            data[choose.randrange(len(data))] = choose.choice((0, 255, choose.randrange(256)))
        del data[choose.randrange(4 * len(data)) :]
        inspect("a", bytes(data), len(data))


def test_hostile_pictures_are_read_in_bounded_time() -> None:
    chunk = struct.pack(">I4sI", 0, b"tEXt", zlib.crc32(b"tEXt"))
    for begin, part in (
        (b"\x89PNG\r\n\x1a\n", chunk),
        (b"\xff\xd8", b"\xff"),
        (b"\xff\xd8", b"\xff\xe0\0\2"),
        (b"\xff\xd8\xff\xda\0\2", b"\xff\0"),
        (b"GIF89a\1\0\1\0\0\0\0!\xff", b"\1\1"),
        (b"RIFF\xff\xff\x34\0WEBP", b"VP8 \0\0\0\0"),
    ):
        data = begin + part * ((MAX_IMAGE - len(begin)) // len(part))
        started = time.monotonic()
        assert fault(data)
        assert time.monotonic() - started < 1
