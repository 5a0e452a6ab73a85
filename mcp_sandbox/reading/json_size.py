"""Measures JSON before a parser or a validator sees it: both do work for each value of it."""

from mcp_sandbox.errors import TooLarge

MOST_VALUES, _MOST_BESIDE = 20_000, 1 << 20


def check_json_size(text: bytes | bytearray, most_values: int = MOST_VALUES) -> None:
    """Return if there are few values in JSON, and little outside of its strings; in linear time.

    What is no JSON is measured up to where a parser would stop. Raises TooLarge.
    """
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # Each member of an object has two strings, and each string two quotes.
    values = plain.count(b'"') // 4
    if values <= most_values:
        beside = b"".join(plain.split(b'"')[::2])
        if len(beside) > _MOST_BESIDE:
            raise TooLarge(
                f"outside of its texts a message may have {_MOST_BESIDE:,} bytes, this one has "
                f"{len(beside):,}: send less at a time, or send lists and numbers in a text"
            )
        # Every value but the first stands behind one of these.
        values = sum(map(beside.count, (b",", b"[", b"{")))
    if values > most_values:
        raise TooLarge(
            f"a message may have {most_values:,} values in lists and objects, this one has more: "
            "send less at a time, or send them in a text"
        )
