"""Where the front matter of a document lies, and what its YAML says. Pure: bytes in, values out.

python-frontmatter reads the document, by a handler that is stricter than its own: no aliases, tags
or duplicate keys, within bounds, and every scalar is the text that stands there (`on`, `3000`,
`2026-01-01`, `~`). The bytes are divided here, so that a byte-order mark, the line ends of another
system or dashes inside a value neither hide a skill nor cut it, and the body stays byte for byte.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import frontmatter
import yaml
from frontmatter.default_handlers import YAMLHandler

from mcp_sandbox.errors import OperatorError
from mcp_sandbox.skills.skill import Diagnostic, Json, Level

HEAD_BYTES = 64 * 1024
"""How many bytes of a document are read to find its front matter."""
MAX_BYTES = 16 * 1024
"""Longer front matter is refused; the longest of thousands of published ones is far shorter."""
_MAX_VALUES = 1000
_MAX_DEPTH = 20

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
_TAGGED = (yaml.ScalarEvent, yaml.CollectionStartEvent)
# Scalars of up to this many characters are likely to repeat, so they are cached.
_WORD = 24
_DASHES = "Begin the file with a line of three dashes, the fields, and again three dashes."
_ODD: Final[dict[str, tuple[Level, str, str]]] = {
    "byte-order-mark": ("warning", "The file begins with a byte-order mark.",
        "Save the file as UTF-8 without a byte-order mark."),
    "blank-first-line": ("warning", "The file begins with a blank line.",
        "Delete it, so that the file begins with three dashes."),
    "dots": ("warning", "The front matter ends in `...` and not in `---`.",
        "End the front matter with three dashes."),
    "fence-spaces": ("note", "White space follows the dashes of the front matter.", "Delete it."),
    "line-ends": ("note", "Lines end in a carriage return, as on Windows or old Macs.",
        "Save the file with Unix line ends."),
}  # fmt: skip
_MISTAKES = frozenset({"yaml", "key"})
"""Codes of errors behind which fields can still be read line by line."""
# A field in the first column that has a text behind its colon; indented lines go on with it.
_PLAIN_FIELD = re.compile(
    r"^([A-Za-z][\w-]*)[ \t]*:[ \t]+(?:[|>][-+]?[0-9]?(?=[ \t]*\n))?"
    r"(\S?[^\n]*(?:\n[ \t]+[^\n]*)*)",
    re.MULTILINE,
)
_COMMENT = re.compile(r"(?<=[ \t])#[^\n]*")
_QUOTED = re.compile(r"(['\"])((?:(?!\1).)*)\1")
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


class PlainScalar(str):
    """A scalar that stands in the file without quotes."""

    __slots__ = ()


class InvalidFrontMatter(Exception):
    """The front matter cannot be used; `diagnostic` says why."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.reason)
        self.diagnostic = diagnostic


@dataclass(frozen=True)
class SplitDocument:
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
    the first `&name`; lines count from 1. `broken`: why it is no YAML, so that only fields of one
    text each were read.
    """

    values: dict[str, Json] = field(default_factory=dict[str, Json])
    lines: dict[str, int] = field(default_factory=dict[str, int])
    flow: int | None = None
    anchor: int | None = None
    broken: Diagnostic | None = None


def split(data: bytes, *, cut: bool = False) -> SplitDocument:
    """Divide a document into the head, with the front matter in it, and the body.

    `cut` says that `data` is only the beginning of the document.
    """
    opening = _OPENING.match(data)
    if opening is None:
        return SplitDocument(b"", data, missing=_absent(data))
    closing = _CLOSING.search(data, opening.end() - 1)
    if closing is None:
        fix = "Put a line of three dashes, not indented, after the last field."
        reason = "The front matter begins but does not end."
        unclosed = Diagnostic("unclosed", "error", reason, fix, 1)
        beyond = _too_long(f"does not end in the first {len(data):,} bytes")
        return SplitDocument(b"", data, missing=beyond if cut else unclosed)
    head, body = data[: closing.end()], data[closing.end() :]
    line = 2 + len(_LINE_END.findall(opening[2]))
    odd = {
        "byte-order-mark": opening[1],
        "blank-first-line": opening[2],
        "dots": closing[1][:1] == b".",
        "fence-spaces": opening[3] or closing[2],
        "line-ends": b"\r" in head,
    }
    oddities = tuple(Diagnostic(code, *_ODD[code], 1) for code, is_so in odd.items() if is_so)
    return SplitDocument(head, body, data[opening.end() : closing.start() + 1], line, oddities)


def text(parts: SplitDocument) -> str:
    """Return the YAML of the front matter as text whose lines end in line feeds.

    Raises InvalidFrontMatter: there is none, it is too long, or it is not UTF-8.
    """
    if parts.missing is not None:
        raise InvalidFrontMatter(parts.missing)
    if len(parts.yaml) > MAX_BYTES:
        raise InvalidFrontMatter(_too_long(f"has {len(parts.yaml):,} bytes"))
    try:
        return re.sub("\r\n?", "\n", parts.yaml.decode())
    except UnicodeDecodeError as error:
        line = parts.line + len(_LINE_END.findall(parts.yaml[: error.start]))
        reason = f"The front matter is not UTF-8: byte 0x{parts.yaml[error.start]:02x}."
        fix = "Save the file as UTF-8."
        raise InvalidFrontMatter(Diagnostic("not-utf-8", "error", reason, fix, line)) from error


def read_leniently(parts: SplitDocument) -> Fields:
    """Read the front matter; where it is no YAML, by its lines.

    Raises InvalidFrontMatter: it has no description even so, or cannot be read for another reason.
    """
    try:
        return read(parts)
    except InvalidFrontMatter as refused:
        fields = Fields(broken=refused.diagnostic)
        if refused.diagnostic.code in _MISTAKES:
            source = text(parts)
            for found in _PLAIN_FIELD.finditer(source):
                value = " ".join(_COMMENT.sub("", found[2]).split())
                quoted = _QUOTED.fullmatch(value)
                fields.values.setdefault(found[1], quoted[2] if quoted else value)
                line = parts.line + source.count("\n", 0, found.start())
                fields.lines.setdefault(found[1], line)
        if not fields.values.get("description"):
            raise
        return fields


def read(parts: SplitDocument) -> Fields:
    """Return what the front matter of a document says.

    Raises:
        InvalidFrontMatter: there is none, it is not YAML, or has what is not read here.
        OperatorError: PyYAML was built without its C library.
    """
    handler = _Handler(text(parts), parts.line)
    # Its `loads` does no more than this, and breaks at a field called `content` or `handler`.
    frontmatter.parse(parts.head.decode("utf-8-sig"), handler=handler)
    return handler.fields


class _Handler(YAMLHandler):
    """Reads YAML for python-frontmatter, within bounds. It begins in that line of its document.

    The library has changed the text before: it is divided here beforehand, where its lines are
    still those of the file.
    """

    def __init__(self, source: str, line: int) -> None:
        super().__init__()
        self._source, self._line = source, line
        self.fields = Fields()

    def split(self, text: str) -> tuple[str, str]:  # noqa: ARG002
        return self._source, ""

    def load(self, fm: str, **_: object) -> dict[str, Json]:
        if not yaml.__with_libyaml__:
            raise OperatorError(
                "PyYAML lacks its C library here, without which hostile files could stall the "
                "server; install it with libyaml: pip install --force-reinstall pyyaml"
            )
        try:
            events = iter(yaml.CBaseLoader(fm).get_event, None)
            self.fields = _YamlReader(events, self._line).document()
        except yaml.YAMLError as error:
            raise InvalidFrontMatter(_broken(error, fm, self._line)) from error
        return self.fields.values


class _YamlReader:
    """Makes values of the events of YAML, and stops at the first that is not read here."""

    def __init__(self, events: Iterator[yaml.Event], line: int) -> None:
        self._events = events
        self._line = line
        self._read = 0
        self._fields = Fields()

    def document(self) -> Fields:
        next(self._events)  # The stream's start.
        event = next(self._events)
        if isinstance(event, yaml.DocumentStartEvent):
            event = next(self._events)
            if not isinstance(event, yaml.MappingStartEvent):
                fix = "Write fields such as `name: value`, one to a line."
                raise self._refused("not-a-mapping", event, "has no fields", fix)
            self._allow(event, 0)
            self._fields.values = self._mapping(1)
            next(self._events)  # The document's end.
            event = next(self._events)
        if isinstance(event, yaml.DocumentStartEvent):
            raise self._refused("yaml", event, "has a second document", "Keep one block of fields.")
        return self._fields

    def _value(self, event: yaml.Event, depth: int) -> Json:
        self._allow(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(depth + 1)
        items: list[Json] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._allow(event, depth)
            if not isinstance(event, yaml.ScalarEvent):
                fix = "Use a plain word as the key; quote a value that begins with a bracket."
                raise self._refused("key", event, "has a key that is not text", fix)
            key = _scalar(event)
            if key in found:
                fix = "Keep one of the two."
                raise self._refused("duplicate-key", event, f"has {shorten_value(key)} twice", fix)
            if depth == 1:
                self._fields.lines[key] = self._at(event)
            found[key] = self._value(next(self._events), depth)
        return found

    def _allow(self, event: yaml.Event, depth: int) -> None:
        self._read += 1
        if self._read > _MAX_VALUES:
            what = f"has over {_MAX_VALUES:,} keys and values"
            raise self._refused("too-many-values", event, what, "Move data into a file.")
        if isinstance(event, yaml.ScalarEvent) and event.anchor is None and event.tag is None:
            return
        if isinstance(event, yaml.AliasEvent):
            what = f"has the YAML alias {shorten_value('*' + str(event.anchor))}"
            raise self._refused("alias", event, what, "Write the value out, or quote it.")
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            self._fields.anchor = self._fields.anchor or self._at(event)
        if isinstance(event, _TAGGED) and event.tag is not None:
            what = f"has the YAML tag {shorten_value(event.tag)}"
            raise self._refused("tag", event, what, "Leave the tag out, or quote the value.")
        if isinstance(event, yaml.CollectionStartEvent) and depth >= _MAX_DEPTH:
            what = f"is nested more than {_MAX_DEPTH} deep"
            raise self._refused("too-deep", event, what, "Flatten it, or move data into a file.")
        if isinstance(event, yaml.CollectionStartEvent) and event.flow_style:
            self._fields.flow = self._fields.flow or self._at(event)

    def _at(self, event: yaml.Event) -> int:
        return self._line + (event.start_mark.line if event.start_mark else 0)

    def _refused(self, code: str, event: yaml.Event, what: str, fix: str) -> InvalidFrontMatter:
        return InvalidFrontMatter(
            Diagnostic(code, "error", f"The front matter {what}.", fix, self._at(event))
        )


def _scalar(event: yaml.ScalarEvent) -> str:
    if not event.implicit[0]:
        return event.value
    return _word(event.value) if len(event.value) <= _WORD else PlainScalar(event.value)


# Equal words share one object: thousands of skills have the same keys.
_word = functools.lru_cache(maxsize=1024)(PlainScalar)


def _broken(error: yaml.YAMLError, source: str, line: int) -> Diagnostic:
    if unprintable := _UNPRINTABLE.search(source):
        at = line + len(re.findall(r"\r\n?|\n", source[: unprintable.start()]))
        reason = f"The front matter has the control character U+{ord(unprintable[0]):04X}."
        fix = "Delete it, or type what was meant."
        return Diagnostic("control-character", "error", reason, fix, at)
    fix = "Quote values that have a colon or begin with a special character; indent by spaces."
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Diagnostic("yaml", "error", "The front matter is not YAML.", fix, line)
    reason = f"The front matter is not YAML: {error.problem}."
    return Diagnostic("yaml", "error", reason, fix, line + error.problem_mark.line)


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


def shorten_value(value: str) -> str:
    """Return the value in quotes, shortened if it is long."""
    return repr(value if len(value) <= 40 else value[:39] + "…")


def as_json(value: Json) -> Json:
    """Return the value with its plain scalars converted. What JSON cannot express stays text."""
    if isinstance(value, dict):
        return {_key(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_json(each) for each in value]
    return _meant(value) if isinstance(value, PlainScalar) else value


def _meant(text: PlainScalar) -> Json:
    if text in _WORDS:
        return _WORDS[text]
    base = next((base for pattern, base in _INTEGERS if pattern.fullmatch(text)), None)
    if base is not None:
        return int(text, base)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return str(text)


def _key(key: str) -> str:
    """Return a key as hosts convert it to text: `1.50` becomes "1.5", and `~` the empty text."""
    value = _meant(key) if isinstance(key, PlainScalar) else key
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return "" if value is None else str(value)
