"""Text that a person judges, on one line or several: whatever shows nothing is an escape. Pure."""

import re

# Letters and marks without a shape; what else shows nothing is not printable.
_SHAPELESS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0000-\U000e0fff]"
)


def escape_unseen(text: str, kept: str = "\n\t") -> str:
    """Return text in which all that is invisible, moves, or turns the direction is an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in kept or _is_seen(char) else _escape(char) for char in text)


def _is_seen(char: str) -> bool:
    return char.isprintable() and not _SHAPELESS.match(char)


def _escape(char: str) -> str:
    return (
        char.encode("ascii", "backslashreplace").decode()
        if ord(char) > 0x7F
        else f"\\x{ord(char):02x}"
    )
