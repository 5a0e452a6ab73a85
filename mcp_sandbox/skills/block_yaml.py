"""Writes values as YAML in block style: one key or item to a line. Pure.

Plain scalars stay as plain as they were read, so that a number stays a number.
"""

import re
from collections.abc import Iterator

from mcp_sandbox.skills.core_schema import Plain, as_json
from mcp_sandbox.skills.models import Json

_HARMLESS = re.compile(r"[A-Za-z](?:[\w./-]| (?! ))*(?<! )")
_WORDS_OF_OLDER_YAML = frozenset({"y", "n", "yes", "no", "on", "off"})
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def without_empty(value: Json) -> Json:
    """The value as lines can say it: they have no empty list or mapping, only empty text."""
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items()} if value else ""
    if isinstance(value, list):
        return [without_empty(each) for each in value] if value else ""
    return value


def written(key: str, value: Json, indent: str, eol: str) -> Iterator[str]:
    """The lines of a field."""
    if isinstance(value, dict | list):
        yield f"{indent}{_scalar(key)}:{eol}"
        yield from _nested(value, f"{indent}  ", eol)
    else:
        text = _scalar(str(value) if not isinstance(value, str) else value)
        yield f"{indent}{_scalar(key)}: {text}{eol}" if text else f"{indent}{_scalar(key)}:{eol}"


def _nested(value: dict[str, Json] | list[Json], indent: str, eol: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from written(key, each, indent, eol)
        return
    for each in value:
        if isinstance(each, dict | list):
            yield f"{indent}-{eol}"
            yield from _nested(each, f"{indent}  ", eol)
        else:
            yield f"{indent}- {_scalar(str(each) if not isinstance(each, str) else each)}{eol}"


def _scalar(text: str) -> str:
    if isinstance(text, Plain):
        return text
    harmless = _HARMLESS.fullmatch(text) and text.lower() not in _WORDS_OF_OLDER_YAML
    if harmless and as_json(Plain(text)) == text:
        return text
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\U{ord(character):08x}"
