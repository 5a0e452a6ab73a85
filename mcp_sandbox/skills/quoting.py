"""Puts values in quotes that YAML takes for something else. Pure.

The commonest mistake in front matter is a text with a colon in it that is not quoted:

    description: Use when: the user has a PDF
"""

import re
from collections.abc import Sequence

from mcp_sandbox.skills import front_matter

MAX_QUOTED = 32
_LINES = re.compile(r"[^\r\n]*(?:\r\n?|\n|\Z)")
_ENTRY = re.compile(r"( *)[\w.-]+[ \t]*:[ \t]+(?=[^\s#])")
_COLON = re.compile(r":(?:\s|\Z)")
# A line that goes on with a value, and looks like a field that is indented by mistake.
_FIELD = re.compile(r"^[ \t]+[\w.-]+[ \t]*:(?:\s|\Z)", re.MULTILINE)
_PAIRS = (("[", "]"), ("{", "}"))


def quoted(source: str) -> tuple[str, tuple[int, ...]]:
    """The YAML text with such values in quotes, and the lines of them, counted from 0.

    Lines stay the lines that they were. At most 32 values are changed.
    """
    lines = _LINES.findall(source)
    blocks: list[str] = []
    changed: list[int] = []
    at = 0
    while at < len(lines):
        entry = _ENTRY.match(lines[at])
        end = _end(lines, at, len(entry[1])) if entry else at + 1
        block = "".join(lines[at:end])
        if entry and len(changed) < MAX_QUOTED and _is_mistaken(block[entry.end() :].rstrip()):
            block = _in_quotes(block, entry.end())
            changed.append(at)
        blocks.append(block)
        at = end
    return "".join(blocks), tuple(changed)


def _end(lines: Sequence[str], at: int, indent: int) -> int:
    """Where the value ends that begins in line `at`: lines go on that are further indented."""
    end = at + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][: indent + 1].isspace()):
        end += 1
    return end


def _is_mistaken(value: str) -> bool:
    first = value[0]
    if first in "|>":
        return False
    if first in "[{":
        return all(value.count(left) == value.count(right) for left, right in _PAIRS) and (
            not _is_yaml(value)
        )
    if first in "'\"":
        return value.count(first) > 1 and not _is_yaml(value)
    if first in "*&!":
        return not _is_yaml(value)
    return first in "%@`" or value[:2] in {"- ", "? "} or _has_colon(value)


def _has_colon(value: str) -> bool:
    colon = _COLON.search(value)
    if colon is None:
        return False
    return _FIELD.search(value) is None or not re.search(r"[\r\n]", value[: colon.start()])


def _is_yaml(value: str) -> bool:
    try:
        front_matter.read(f"value: {value}\n")
    except front_matter.Refused as refused:
        return refused.diagnostic.code != "yaml"
    return True


def _in_quotes(block: str, start: int) -> str:
    end = len(block.rstrip())
    value = block[start:end].replace("'", "''")
    return f"{block[:start]}'{value}'{block[end:]}"
