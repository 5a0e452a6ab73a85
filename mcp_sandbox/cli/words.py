"""Times and sizes as people say them."""

from datetime import datetime

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def since(when: datetime, now: datetime) -> str:
    """How long ago it was, in the largest unit that fits."""
    seconds = (now - when).total_seconds()
    for name, size in _UNITS:
        number = int(seconds // size)
        if number > 0:
            return f"{number} {name}{'s' * (number > 1)} ago"
    return "just now"


def show_bytes(size: int) -> str:
    """A size in the largest unit that fits."""
    number = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
