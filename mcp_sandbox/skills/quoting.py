"""Puts values in quotes that YAML takes for something else. Pure.

The commonest mistake in front matter is a text with a colon in it that is not quoted:

    description: Use when: the user has a PDF
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.front_matter import Fields, Refused

MAX_SUSPECTS = 32
_MISTAKES = frozenset({"yaml", "key"})
"""What quotes may cure."""
_LINES = re.compile(r"[^\r\n]*(?:\r\n?|\n|\Z)")
_ENTRY = re.compile(r"( *)[\w.-]+[ \t]*:[ \t]+(?=[^\s#])")
_COLON = re.compile(r":(?:\s|\Z)")
# A line that goes on with a value, and looks like a field that is indented by mistake.
_FIELD = re.compile(r"^[ \t]+[\w.-]+[ \t]*:(?:\s|\Z)", re.MULTILINE)
_CLOSING = ("]", "}")
_SPECIAL = frozenset("[]{},'\"*&!%@`-?")


class Mended(NamedTuple):
    """What a YAML text says, as it stands in `source`; `lines`, from 0, got quotes for that."""

    fields: Fields
    source: str
    lines: tuple[int, ...] = ()


def read_mended(source: str, line: int) -> Mended:
    """Read a text that begins in that line, with values in quotes only if it is no YAML as it is.

    Raises:
        Refused: quotes do not help; what it says is about the text as it is.
    """
    try:
        return Mended(front_matter.read(source, line), source)
    except Refused as refused:
        repaired, lines = quoted(source) if refused.diagnostic.code in _MISTAKES else ("", ())
        if not lines:
            raise
        try:
            return Mended(front_matter.read(repaired, line), repaired, lines)
        except Refused:
            raise refused from None


def quoted(source: str) -> tuple[str, tuple[int, ...]]:
    """The YAML text with such values in quotes, and the lines of them, counted from 0.

    Lines stay the lines that they were. At most 32 values are looked at.
    """
    lines = _LINES.findall(source)
    blocks: list[str] = []
    changed: list[int] = []
    at = suspects = 0
    while at < len(lines):
        entry = _ENTRY.match(lines[at])
        end = _end(lines, at, len(entry[1])) if entry else at + 1
        block = "".join(lines[at:end])
        if entry and suspects < MAX_SUSPECTS and _is_suspect(block[entry.end() :]):
            suspects += 1
            if not _is_yaml(block[entry.end() :]):
                block = _in_quotes(block, entry.end())
                changed.append(at)
        blocks.append(block)
        at = end
    return "".join(blocks), tuple(changed)


def _end(lines: Sequence[str], at: int, indent: int) -> int:
    """Where the value ends that begins in line `at`.

    Lines go on with it that are further indented, or begin with a closing bracket.
    """
    end = at + 1
    while end < len(lines) and _goes_on(lines[end], indent):
        end += 1
    return end


def _goes_on(line: str, indent: int) -> bool:
    stripped = line.strip()
    return not stripped or line[: indent + 1].isspace() or stripped.startswith(_CLOSING)


def _is_suspect(value: str) -> bool:
    first = value[0]
    if first in "'\"" and value.count(first) == 1:
        return False
    return first in _SPECIAL or (first not in "|>" and _has_colon(value))


def _has_colon(value: str) -> bool:
    colon = _COLON.search(value)
    if colon is None:
        return False
    return _FIELD.search(value) is None or not re.search(r"[\r\n]", value[: colon.start()])


def _is_yaml(value: str) -> bool:
    try:
        front_matter.read(f"value: {value}\n")
    except Refused as refused:
        return refused.diagnostic.code not in _MISTAKES
    return True


def _in_quotes(block: str, start: int) -> str:
    end = len(block.rstrip())
    value = block[start:end].replace("'", "''")
    return f"{block[:start]}'{value}'{block[end:]}"
