"""Measures JSON before a parser or a validator sees it: both do work for each value of it."""

import json

from mcp_sandbox.errors import TooLarge

_MOST_BESIDE = 1 << 20


def check_json_size(text: bytes | bytearray, most_values: int = 20_000) -> None:
    """Raise TooLarge if there are many values in JSON, or much outside of texts; in linear time.

    What is no JSON is measured up to where a parser would stop.
    """
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # Each member of an object has two texts, and each text two quotes.
    # In other encodings, which some parsers guess, texts could hide what is beside them.
    if json.detect_encoding(text[:4]).startswith("utf-8") and plain.count(b'"') <= 4 * most_values:
        beside = b"".join(plain.split(b'"')[::2])
        # Every value but the first stands behind one of these.
        values = sum(map(beside.count, (b",", b"[", b"{")))
        if values <= most_values and len(beside) <= _MOST_BESIDE:
            return
    raise TooLarge(
        f"a message is UTF-8, and may have {most_values:,} values in lists and objects, and "
        f"{_MOST_BESIDE:,} bytes outside of its texts: send less at a time, or send it in a text"
    )
