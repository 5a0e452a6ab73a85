"""Where the front matter of a document lies, and what its YAML says. Pure: bytes in, values out.

The bytes are divided here and not by a library, so that a byte-order mark, the line ends of
another system or dashes inside a value neither hide a skill nor cut it, and the body stays as it
is, byte for byte. Of YAML only what names things and texts is read: no aliases, tags or duplicate
keys, and every scalar is the text that stands there (`on`, `3000`, `2026-01-01`, `~`).
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)

from mcp_sandbox.errors import OperatorError
from mcp_sandbox.skills.core_schema import Plain
from mcp_sandbox.skills.models import Diagnostic, Json

HEAD_BYTES = 64 * 1024
"""So much of a document has to be read to know its front matter."""
MAX_BYTES = 16 * 1024
"""Longer front matter is refused; the longest of thousands of published ones is far shorter."""

_EOL = rb"(?:\r\n|\r(?!\n)|\n)"
_OPENING = re.compile(
    rb"(\xef\xbb\xbf)?((?:[ \t]*+" + _EOL + rb")*)---([ \t]*+)(?:" + _EOL + rb"|\Z)"
)
_CLOSING = re.compile(
    rb"[\r\n](---|\.\.\.(?:[ \t]*+" + _EOL + rb"---)?)([ \t]*+)(?:" + _EOL + rb"|\Z)"
)
_LINE_END = re.compile(rb"\r\n?|\n")
_ALMOST = re.compile(rb"\s*(?:-{2,}|\xe2\x80\x93|\xe2\x80\x94|\+\+\+|```)")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGGED = (ScalarEvent, CollectionStartEvent)
# Scalars of up to so many characters are likely to come again.
_WORD = 24
_DASHES = "Begin the file with a line of three dashes, the fields, and again three dashes."


class Refused(Exception):
    """The front matter cannot be used; `diagnostic` says why."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.reason)
        self.diagnostic = diagnostic


@dataclass(frozen=True)
class Parts:
    """A document divided: `head` and `body` together are all of its bytes.

    `yaml` is what stands between the fences and begins in line `line`. Where there are no two
    fences, all is body and `missing` says why. `oddities` do not keep it from being read.
    """

    head: bytes
    body: bytes
    yaml: bytes = b""
    line: int = 1
    oddities: tuple[Diagnostic, ...] = ()
    missing: Diagnostic | None = None


@dataclass
class Fields:
    """What the front matter says: the fields in the file's order, all scalars as text.

    `lines` has the line of each field, `flow` that of the first `[…]` or `{…}`, `anchor` that of
    the first `&name`, `ragged` that of the first map that is indented otherwise than one beside
    it; lines count from 1.
    """

    values: dict[str, Json] = field(default_factory=dict[str, Json])
    lines: dict[str, int] = field(default_factory=dict[str, int])
    flow: int | None = None
    anchor: int | None = None
    ragged: int | None = None


@dataclass(frozen=True)
class Limits:
    """How much is read: keys and values together, and how deep they are nested."""

    values: int = 1000
    depth: int = 20


ORDINARY = Limits()


def split(data: bytes, *, cut: bool = False) -> Parts:
    """Divide a document into the head, with the front matter in it, and the body.

    `cut` says that `data` is only the beginning of the document.
    """
    opening = _OPENING.match(data)
    if opening is None:
        return Parts(b"", data, missing=_absent(data))
    closing = _CLOSING.search(data, opening.end() - 1)
    if closing is None:
        return Parts(b"", data, missing=_unclosed(len(data) if cut else None))
    head, body = data[: closing.end()], data[closing.end() :]
    line = 2 + len(_LINE_END.findall(opening[2]))
    oddities = tuple(_oddities(opening, closing, head))
    return Parts(head, body, data[opening.end() : closing.start() + 1], line, oddities)


def text(parts: Parts) -> str:
    """The YAML of the front matter as text.

    Raises:
        Refused: there is none, it is too long, or it is not UTF-8.
    """
    if parts.missing is not None:
        raise Refused(parts.missing)
    if len(parts.yaml) > MAX_BYTES:
        raise Refused(_too_long(f"has {len(parts.yaml):,} bytes"))
    try:
        return parts.yaml.decode()
    except UnicodeDecodeError as error:
        line = parts.line + len(_LINE_END.findall(parts.yaml[: error.start]))
        reason = f"The front matter is not UTF-8: byte 0x{parts.yaml[error.start]:02x}."
        fix = "Save the file as UTF-8."
        raise Refused(Diagnostic("not-utf-8", "error", reason, fix, line)) from error


def read(source: str, line: int = 1, limits: Limits = ORDINARY) -> Fields:
    """What the YAML text `source` says, whose first line is line `line` of its file.

    Raises:
        Refused: it is not YAML, not a mapping, or has what is not read here.
        OperatorError: PyYAML was built without its C library.
    """
    if not yaml.__with_libyaml__:
        raise OperatorError(
            "PyYAML lacks its C library here, without which hostile files could stall the server; "
            "install it with libyaml, for instance by pip install --force-reinstall pyyaml"
        )
    try:
        return _Reader(iter(yaml.CBaseLoader(source).get_event, None), line, limits).document()
    except yaml.YAMLError as error:
        raise Refused(_broken(error, source, line)) from error


class _Reader:
    """Makes values of the events of YAML, and stops at the first that is not read here."""

    def __init__(self, events: Iterator[Event], line: int, limits: Limits) -> None:
        self._events = events
        self._line = line
        self._limits = limits
        self._read = 0
        self._fields = Fields()

    def document(self) -> Fields:
        next(self._events)  # The stream's start.
        event = next(self._events)
        if isinstance(event, DocumentStartEvent):
            event = next(self._events)
            if not isinstance(event, MappingStartEvent):
                raise self._not_a_mapping(event)
            self._allow(event, 0)
            self._fields.values = self._mapping(1)
            next(self._events)  # The document's end.
            event = next(self._events)
        if isinstance(event, DocumentStartEvent):
            raise self._refused("yaml", event, "has a second document", "Keep one block of fields.")
        return self._fields

    def _value(self, event: Event, depth: int) -> Json:
        self._allow(event, depth)
        if isinstance(event, ScalarEvent):
            return _scalar(event)
        if isinstance(event, MappingStartEvent):
            return self._mapping(depth + 1)
        items: list[Json] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        columns: set[int] = set()
        while not isinstance(event := next(self._events), MappingEndEvent):
            self._allow(event, depth)
            if not isinstance(event, ScalarEvent):
                fix = "Use a plain word as the key; quote a value that begins with a bracket."
                raise self._refused("key", event, "has a key that is not text", fix)
            key = _scalar(event)
            if key in found:
                fix = "Keep one of the two."
                raise self._refused("duplicate-key", event, f"has {_short(key)} twice", fix)
            if depth == 1:
                self._fields.lines[key] = self._at(event)
            value = next(self._events)
            if isinstance(value, MappingStartEvent):
                self._align(value, columns)
            found[key] = self._value(value, depth)
        return found

    def _align(self, event: Event, columns: set[int]) -> None:
        if event.start_mark:
            columns.add(event.start_mark.column)
        if len(columns) > 1 and self._fields.ragged is None:
            self._fields.ragged = self._at(event)

    def _allow(self, event: Event, depth: int) -> None:
        self._read += 1
        if self._read > self._limits.values:
            what = f"has over {self._limits.values:,} keys and values"
            fix = "Move data into a file."
            raise self._refused("too-many-values", event, what, fix)
        if isinstance(event, ScalarEvent) and event.anchor is None and event.tag is None:
            return
        if isinstance(event, NodeEvent) and event.anchor is not None:
            self._allow_anchor(event, event.anchor)
        if isinstance(event, _TAGGED) and event.tag is not None:
            what = f"has the YAML tag {_short(event.tag)}"
            raise self._refused("tag", event, what, "Leave the tag out, or quote the value.")
        if isinstance(event, CollectionStartEvent):
            self._allow_collection(event, depth)

    def _allow_anchor(self, event: NodeEvent, name: str) -> None:
        if isinstance(event, AliasEvent):
            fix = "Write the value out, or quote it."
            raise self._refused("alias", event, f"has the YAML alias {_short('*' + name)}", fix)
        self._fields.anchor = self._fields.anchor or self._at(event)

    def _allow_collection(self, event: CollectionStartEvent, depth: int) -> None:
        if depth >= self._limits.depth:
            what = f"is nested more than {self._limits.depth} deep"
            raise self._refused("too-deep", event, what, "Flatten it, or move data into a file.")
        if event.flow_style and self._fields.flow is None:
            self._fields.flow = self._at(event)

    def _at(self, event: Event) -> int:
        return self._line + (event.start_mark.line if event.start_mark else 0)

    def _refused(self, code: str, event: Event, what: str, fix: str) -> Refused:
        reason = f"The front matter {what}."
        return Refused(Diagnostic(code, "error", reason, fix, self._at(event)))

    def _not_a_mapping(self, event: Event) -> Refused:
        what, fix = "has no fields", "Write fields such as `name: value`, one to a line."
        return self._refused("not-a-mapping", event, what, fix)


def _scalar(event: ScalarEvent) -> str:
    if not event.implicit[0]:
        return event.value
    return _word(event.value) if len(event.value) <= _WORD else Plain(event.value)


@functools.lru_cache(maxsize=1024)
def _word(text: str) -> Plain:
    """One object for all that say the same: thousands of skills have the same keys."""
    return Plain(text)


def _broken(error: yaml.YAMLError, source: str, line: int) -> Diagnostic:
    if unprintable := _UNPRINTABLE.search(source):
        at = line + len(re.findall(r"\r\n?|\n", source[: unprintable.start()]))
        reason = f"The front matter has the control character U+{ord(unprintable[0]):04X}."
        return Diagnostic(
            "control-character", "error", reason, "Delete it, or type what was meant.", at
        )
    fix = "Quote values that have a colon or begin with a special character; indent by spaces."
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Diagnostic("yaml", "error", "The front matter is not YAML.", fix, line)
    reason = f"The front matter is not YAML: {error.problem}."
    return Diagnostic("yaml", "error", reason, fix, line + error.problem_mark.line)


def _oddities(
    opening: re.Match[bytes], closing: re.Match[bytes], head: bytes
) -> Iterator[Diagnostic]:
    if opening[1]:
        yield _odd("byte-order-mark", "warning", "The file begins with a byte-order mark.")
    if opening[2]:
        yield _odd("blank-first-line", "warning", "The file begins with a blank line.")
    if closing[1][:1] == b".":
        yield _odd("dots", "warning", "The front matter ends in `...` and not in `---`.")
    if opening[3] or closing[2]:
        yield _odd("fence-spaces", "note", "White space follows the dashes of the front matter.")
    if b"\r" in head:
        yield _odd(
            "line-ends", "note", "Lines end in a carriage return, as on Windows or old Macs."
        )


_ODD_FIXES = {
    "byte-order-mark": "Save the file as UTF-8 without a byte-order mark.",
    "blank-first-line": "Delete it, so that the file begins with three dashes.",
    "dots": "End the front matter with three dashes.",
    "fence-spaces": "Delete it.",
    "line-ends": "Save the file with Unix line ends.",
}


def _odd(code: str, level: Literal["warning", "note"], reason: str) -> Diagnostic:
    return Diagnostic(code, level, reason, _ODD_FIXES[code], 1)


def _unclosed(read: int | None) -> Diagnostic:
    if read is not None:
        return _too_long(f"does not end in the first {read:,} bytes")
    reason = "The front matter begins but does not end."
    fix = "Put a line of three dashes, not indented, after the last field."
    return Diagnostic("unclosed", "error", reason, fix, 1)


def _too_long(what: str) -> Diagnostic:
    reason = f"The front matter {what}; {MAX_BYTES:,} are the limit."
    fix = "Move what does not describe the skill into the body or a file."
    return Diagnostic("front-matter-too-long", "error", reason, fix, 1)


def _absent(data: bytes) -> Diagnostic:
    code, reason, fix = "no-front-matter", "The file has no front matter.", _DASHES
    if not data.strip():
        code, reason = "empty", "The file is empty."
    elif data[:2] in {b"\xff\xfe", b"\xfe\xff"} or b"\x00" in data[:64]:
        code, reason, fix = "not-utf-8", "The file is not UTF-8.", "Save the file as UTF-8."
    elif _ALMOST.match(data):
        reason = "The first line is not exactly three dashes, so there is no front matter."
    return Diagnostic(code, "error", reason, fix, 1)


def _short(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:39] + "…")
