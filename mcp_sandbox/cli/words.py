"""Times and sizes as people say them, and texts as they can be shown."""

from datetime import datetime

from mcp_sandbox.workspace.retention import in_words


def since(when: datetime, now: datetime) -> str:
    """How long ago it was, in the largest unit that fits."""
    seconds = (now - when).total_seconds()
    return f"{in_words(seconds)} ago" if seconds >= 60 else "just now"


def show_bytes(size: int) -> str:
    """A size in the largest unit that fits."""
    number = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def printable(text: str) -> str:
    """The text as a terminal can show it: its lines stay, and nothing else moves the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
