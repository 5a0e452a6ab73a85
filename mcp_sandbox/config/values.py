"""Kinds of values of settings: how each is written (`512m`, `1h30m`), checked, and shown."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypeVar

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from mcp_sandbox.config.environment import PREFIX, home

T = TypeVar("T")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_S = 86_400
_SIZE_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_TIME_UNITS = {"w": 7 * DAY_S, "d": DAY_S, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
# The other words that people write for a unit, and each of them with an "s".
_SIZE_WORDS = {"b byte": "", "kb kib": "k", "mb mib": "m", "gb gib": "g", "tb tib": "t"}
_TIME_WORDS = {"week": "w", "day": "d", "hr hour": "h", "min minute": "m", "sec second": "s"}
_PART = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)([a-z]*)")


def _spell(units: Mapping[str, T], words: Mapping[str, str]) -> Mapping[str, T]:
    more = {word: unit for each, unit in words.items() for word in each.split()}
    return {**units, **{f"{word}{end}": units[more[word]] for word in more for end in ("", "s")}}


_SIZES, _TIMES = _spell(_SIZE_UNITS, _SIZE_WORDS), _spell(_TIME_UNITS, _TIME_WORDS)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_size(value: object) -> object:
    """Return bytes for a text like `512m` or `2g`; other types are left to the model."""
    if not isinstance(value, str):
        return value
    match = _PART.fullmatch(_squeeze(value))
    if match is None or match[2] not in _SIZES:
        raise ValueError("write a size as bytes or with a unit, such as 512m or 2g")
    return int(Decimal(match[1]) * _SIZES[match[2]])


def parse_duration(value: object) -> object:
    """Return seconds for a text like `10m` or `1h30m`; a bare number is seconds."""
    if not isinstance(value, str):
        return value
    text = _squeeze(value)
    parts = _PART.findall(text) if not is_bare(text) else [(text, "s")]
    whole = "".join(number + unit for number, unit in parts) in (text, f"{text}s")
    if not parts or not whole or any(unit not in _TIMES for _, unit in parts):
        raise ValueError("write a time as seconds or with units, such as 90, 10m or 1h30m")
    return sum(float(number) * _TIMES[unit] for number, unit in parts)


def is_bare(value: object) -> bool:
    """Return whether a value was written as a number without a unit."""
    return bool(re.fullmatch(r"\d+(\.\d+)?", str(value).strip()))


def _squeeze(text: str) -> str:
    return "".join(text.lower().split())


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


def _variable(name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith(PREFIX) or name == "HOME":
        raise ValueError(f"{name!r} cannot be given to a sandbox: use another name")
    return name


def _environment_names(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        _variable(name)
        if "\0" in text:
            raise ValueError(f"the value of {name} holds a NUL byte: remove it")
    return value


def _absolute(value: Path) -> Path:
    if value.parts[:1] == ("~",):
        value = home().joinpath(*value.parts[1:])
    if not value.is_absolute():
        raise ValueError("write an absolute path; only in a file may it be relative, to the file")
    return value


def _proxy(value: str) -> str:
    found = re.fullmatch(r"http://([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})/?", value, re.ASCII)
    if value and not (found and 0 < int(found[2]) < 1 << 16):
        raise ValueError("write the proxy as http://HOST:PORT, without a name and password")
    return value


def _source(value: str) -> str:
    kind, _, rest = value.partition(":")
    if kind == "file" and rest.strip():
        return f"file:{_absolute(Path(rest.strip()))}"
    if kind != "command" or not rest.strip():
        raise ValueError("write where a secret comes from as file:PATH or command: PROGRAM ARGS")
    return value


def _service(value: str) -> str:
    here = r"http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])"
    if not re.fullmatch(rf"(https://[\w.-]+|{here})(:\d{{1,5}})?(/[\w./~-]*)?", value, re.ASCII):
        raise ValueError(
            "write the address as https://HOST/PATH, or http:// for this machine alone, without a "
            "name, password or question"
        )
    return value.rstrip("/")


def _endpoint(value: str) -> str:
    if value and not re.fullmatch(
        r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?", value, re.ASCII
    ):
        raise ValueError("write the address as https://HOST:PORT, or http:// without TLS")
    return value.rstrip("/")


def _key_source(value: str) -> str:
    if not value or re.fullmatch(r"env:\w+", value, re.ASCII):
        return value
    try:
        return _source(value)
    except ValueError as exc:
        raise ValueError(f"{exc}, or as env:NAME") from None


def _uid_range(value: str) -> str:
    first, _, last = (value or "1-1").partition("-")
    if not (f"{first}{last}".isdecimal() and 0 < int(first) <= int(last or 0) < (1 << 31) - 1):
        raise ValueError("write user ids as START-END, such as 200000-265535")
    return value


def _schedule(value: str) -> str:
    try:
        next(CronSim(value, datetime.now(UTC)))
    except (CronSimError, StopIteration):
        raise ValueError("write when as cron does, such as 0 3 * * * for daily at 3") from None
    return value


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
OptionalPath = Annotated[AbsolutePath | None, BeforeValidator(lambda value: value or None)]
Size = Annotated[
    int, BeforeValidator(parse_size), PlainSerializer(show_size, return_type=str), Field(ge=0)
]
_Time = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(show_duration, return_type=str)
]
Duration = Annotated[_Time, Field(gt=0, allow_inf_nan=False)]
DurationOrZero = Annotated[_Time, Field(ge=0, allow_inf_nan=False)]
UidRange = Annotated[str, AfterValidator(_uid_range)]
Schedule = Annotated[str, AfterValidator(_schedule)]
Variable = Annotated[str, AfterValidator(_variable)]
Proxy = Annotated[str, AfterValidator(_proxy)]
Source = Annotated[str, AfterValidator(_source)]
OptionalSource = Annotated[str, AfterValidator(lambda value: value and _source(value))]
KeySource = Annotated[str, AfterValidator(_key_source)]
ServiceUrl = Annotated[str, AfterValidator(_service)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
# Values may be secrets: what is printed or logged shows names only.
Environment = Annotated[
    dict[str, str],
    AfterValidator(_environment_names),
    PlainSerializer(lambda value: dict.fromkeys(value, "(hidden)"), when_used="json"),
]
