"""Reads YAML as the reference tool's library does (strictyaml 1.7), and refuses what that refuses.

It knows less than YAML (no flow style, no tags, no anchors, no tabs between words), and some of it
otherwise: columns are counted from the last line feed only, and `<<` merges without an alias. Pure.
"""

import re
from collections.abc import Iterator

import yaml

from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.core_schema import Plain
from mcp_sandbox.skills.front_matter import Fields, Limits, Refused
from mcp_sandbox.skills.models import Diagnostic, Json

_LIMITS = Limits(values=100_000, depth=100)
_MAX_CHARACTERS = 256 * 1024
_OTHER_ENDS = re.compile("[\x85\u2028\u2029]")
_MAX_INDENT = 60
_TAB = re.compile(r"^(?:[^#\t\n]|(?<=\S)#)*\t", re.MULTILINE)
_BLOCK = "Write one item or key to a line, or put the value in quotes."


def read(source: str) -> Fields:
    """What the text says, but for what a top-level `<<` merges: strictyaml leaves that out.

    Raises:
        Refused: strictyaml refuses it.
    """
    if len(source) > _MAX_CHARACTERS:
        reason = f"The front matter has over {_MAX_CHARACTERS:,} characters."
        raise _refused("front-matter-too-long", reason, "Move what is long into a file.", 1)
    # The C library skips a byte-order mark at the beginning of any line; here it is a character.
    source = source[:1] + source[1:].replace("\ufeff", "\u2060")
    source = _with_line_feeds(source)
    fields = front_matter.read(source, limits=_LIMITS)
    if fields.flow is not None:
        raise _refused("flow-style", "A value has brackets or braces.", _BLOCK, fields.flow)
    if fields.anchor is not None:
        raise _refused("anchor", "A value has an anchor.", "Delete it, or quote.", fields.anchor)
    if fields.ragged is not None:
        reason = "A map is indented otherwise than one beside it."
        raise _refused("indentation", reason, "Indent both by the same.", fields.ragged)
    if tab := _TAB.search(_outside(source)):
        line = 1 + source.count("\n", 0, tab.end())
        raise _refused("tab", "A tab stands outside of quotes.", "Use spaces.", line)
    _check_merges(fields.values)
    fields.values = {key: each for key, each in fields.values.items() if not _merges(key)}
    return fields


def _with_line_feeds(source: str) -> str:
    """The text with line feeds for other ends of lines, after which a column is not the first."""
    if source.isascii():
        return source
    return "\n".join(_divided(line) for line in source.split("\n"))


def _divided(line: str) -> str:
    pieces = _OTHER_ENDS.split(line)
    column = 0
    for at, piece in enumerate(pieces):
        pieces[at] = " " * min(column, _MAX_INDENT) + piece
        column += len(piece) + 1
    return "\n".join(pieces)


def _outside(source: str) -> str:
    """The text with an x for everything in quotes and blocks of text."""
    if "\t" not in source:
        return ""
    pieces: list[str] = []
    at = 0
    for start, end in _quoted(source):
        pieces += source[at:start], re.sub(r"[^\n]", "x", source[start:end])
        at = end
    return "".join(pieces) + source[at:]


def _quoted(source: str) -> Iterator[tuple[int, int]]:
    for event in yaml.parse(source, Loader=yaml.CBaseLoader):
        if isinstance(event, yaml.ScalarEvent) and event.style and event.start_mark:
            start, end = event.start_mark.index, event.end_mark.index if event.end_mark else 0
            if event.style in "|>":
                start = source.find("\n", start, end)
            if start >= 0:
                yield start, end


def _merges(key: str) -> bool:
    return key == "<<" and isinstance(key, Plain)


def _check_merges(value: Json) -> None:
    if isinstance(value, list):
        for each in value:
            _check_merges(each)
    if isinstance(value, dict):
        for key, each in value.items():
            merged = each if isinstance(each, list) else [each]
            if _merges(key) and not all(isinstance(one, dict) for one in merged):
                fix = "Put the key in quotes."
                raise _refused("merge", "The key << has no map to merge.", fix)
            _check_merges(each)


def _refused(code: str, reason: str, fix: str, line: int | None = None) -> Refused:
    return Refused(Diagnostic(code, "error", reason, fix, line))
