"""What hosts make of front matter: the values that YAML 1.2's core schema has for plain scalars.

Here every scalar is text, so that nothing that YAML guesses changes a skill. Hosts of skills over
MCP read the same front matter again and refuse a skill whose values differ from what they were
told, in type too: `version: 1.0` has to be a number there, and `on` or a date a text. Pure.
"""

import math
import re
from typing import Final

from mcp_sandbox.skills.models import Json

_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGERS = (
    (re.compile(r"[-+]?[0-9]{1,300}"), 10),
    (re.compile(r"0o[0-7]{1,300}"), 8),
    (re.compile(r"0x[0-9a-fA-F]{1,300}"), 16),
)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class Plain(str):
    """A scalar that stands in the file without quotes."""

    __slots__ = ()


def as_json(value: Json) -> Json:
    """The value with what its plain scalars mean. What JSON cannot say stays text."""
    if isinstance(value, dict):
        return {_key(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_json(each) for each in value]
    return _meant(value) if isinstance(value, Plain) else value


def _meant(text: Plain) -> Json:
    if text in _WORDS:
        return _WORDS[text]
    for pattern, base in _INTEGERS:
        if pattern.fullmatch(text):
            return int(text, base)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return str(text)


def _key(key: str) -> str:
    """A key as hosts that turn it into text know it: `1.50` is "1.5", and `~` is nothing."""
    value = _meant(key) if isinstance(key, Plain) else key
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return "" if value is None else str(value)
