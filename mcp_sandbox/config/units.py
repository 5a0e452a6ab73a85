"""Sizes and times as people write them: `512m`, `2g`, `10m`, `1h30m`."""

import re
from decimal import Decimal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_TIME_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")


def parse_size(value: object) -> object:
    """Return bytes for a text like `512m` or `2g`; other types are left to the model."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("write a size as bytes or with a unit, such as 512m or 2g")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2].lower()])


def parse_duration(value: object) -> object:
    """Return seconds for a text like `10m` or `1h30m`; a bare number is seconds."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _TIME_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("write a time as seconds or with units, such as 90, 10m or 1h30m")
    return sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)


def show_size(value: int) -> str:
    """Return the shortest exact text that `parse_size` reads back."""
    for unit in ("t", "g", "m", "k"):
        if value and value % _SIZE_UNITS[unit] == 0:
            return f"{value // _SIZE_UNITS[unit]}{unit}"
    return str(value)


def show_duration(value: float) -> str:
    """Return the shortest exact text that `parse_duration` reads back."""
    for unit in ("d", "h", "m"):
        if value and value % _TIME_UNITS[unit] == 0:
            return f"{int(value // _TIME_UNITS[unit])}{unit}"
    return f"{value:g}s"
