"""Repairs the front matter of a document so that strict readers take it too. Pure.

No value is lost: the body stays byte for byte, correct fields stay as they are written, and a
repair that would change a value is refused. Other fields are written anew by python-frontmatter,
one key or item to a line; comments within them are lost. What cannot
be known (a missing description, which of two keys is meant) is left to a person.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import frontmatter
import yaml
from frontmatter.default_handlers import YAMLHandler

from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.front_matter import (
    Fields,
    InvalidFrontMatter,
    PlainScalar,
    SplitDocument,
    as_json,
)
from mcp_sandbox.skills.parse import NAME_CHARACTERS, STANDARD, front_of
from mcp_sandbox.skills.skill import Diagnostic, Json

CLIENT_FIELDS = frozenset(
    {"agent", "argument-hint", "arguments", "context", "disable-model-invocation",
     "disallowed-tools", "hooks", "model", "paths", "user-invocable"}
)  # fmt: skip
"""Fields beside the standard that clients act on: elsewhere they would mean nothing any more."""
_LAST_LINE_END = re.compile(rb"(?:\r\n|\r|\n)\Z")
_MAX_NAMED = 10
_FENCES = {
    "byte-order-mark": "took the byte-order mark away",
    "blank-first-line": "took the blank lines at the beginning away",
    "dots": "closed the front matter with dashes",
    "fence-spaces": "took white space after the dashes away",
}


@dataclass(frozen=True)
class Repair:
    """A document after the repair, and what was done; `problem`: why it cannot be repaired."""

    data: bytes
    changes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    problem: Diagnostic | None = None


def repair(data: bytes, folder_name: str, *, everything: bool = False) -> Repair:
    """Return the document repaired, for a skill in the folder of that name.

    With `everything` also the fields that only some clients know move into metadata; else they
    are in `kept`.
    """
    parts = front_matter.split(data)
    try:
        fields = front_matter.read_with_repairs(front_matter.text(parts), parts.line)
        work = _Work(fields, dict(fields.values), *_as_written(fields, parts.line))
        work.repair(folder_name, everything=everything)
        repaired = _assembled(parts, work)
    except InvalidFrontMatter as refused:
        return Repair(data, problem=refused.diagnostic)
    changes = [_FENCES[each.code] for each in parts.oddities if each.code in _FENCES]
    changes += work.changes
    return Repair(repaired if changes else data, tuple(changes), tuple(work.kept))


def _assembled(parts: SplitDocument, work: "_Work") -> bytes:
    """Return the whole document; its lines end as they did, that of the second fence too."""
    post = frontmatter.Post("")
    post.metadata = {**work.values}
    head = frontmatter.dumps(post, _Writer(work.own, work.above))
    ends = re.findall(rb"\r\n?|\n", parts.yaml)
    head = head.replace("\n", ends[0].decode() if ends else "\n")
    end = _LAST_LINE_END.search(parts.head)
    data = head.encode() + (end[0] if end else b"") + parts.body
    again = front_matter.split(data)
    found = front_matter.read(front_matter.text(again)).values
    same = found == work.values and as_json(dict(found)) == as_json(dict(work.values))
    if not same or again.body != parts.body:
        reason = "The front matter is written in a way that cannot be repaired without harm."
        fix = "Write each field as a plain `key: value` line."
        raise InvalidFrontMatter(Diagnostic("not-repairable", "error", reason, fix))
    return data


class _Writer(YAMLHandler):
    """Exports fields for python-frontmatter: as they are written where that stays, else anew.

    `above` has the remarks above a field, and under None those below all.
    """

    def __init__(self, own: Mapping[str, str], above: Mapping[str | None, str]) -> None:
        super().__init__()
        self._own = own
        self._above = above

    def export(self, metadata: dict[str, object], **_: object) -> str:
        pieces = [
            self._above.get(key, "") + (self._own.get(key) or self._anew(key, value))
            for key, value in metadata.items()
        ]
        return "".join([*pieces, self._above.get(None, "")]).removesuffix("\n")

    def _anew(self, key: str, value: object) -> str:
        seen = json.dumps({key: value}, ensure_ascii=False).isprintable()
        options = {"Dumper": _Dumper, "sort_keys": False, "width": sys.maxsize}
        return super().export({key: value}, allow_unicode=seen, **options) + "\n"


class _Dumper(yaml.SafeDumper):
    """Indents items below their key, and keeps plain scalars plain: a number stays a number."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)

    def text(self, text: str) -> yaml.ScalarNode:
        if isinstance(text, PlainScalar):
            tag = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
            return yaml.ScalarNode(tag, str(text))
        style = "|" if "\n" in text and not text.endswith("\n\n") else None
        if as_json(PlainScalar(text)) != text:
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(PlainScalar, _Dumper.text)


def _as_written(fields: Fields, line: int) -> tuple[dict[str, str], dict[str | None, str]]:
    """Return the lines of each field, and the remarks above each and, under None, below all."""
    lines = fields.source.splitlines(keepends=True)
    starts = sorted((at - line, key) for key, at in fields.lines.items())
    if len({at for at, _ in starts}) < len(starts) or "" in fields.flows:
        return {}, {}
    own: dict[str, str] = {}
    above: dict[str | None, str] = {}
    remarks = "".join(lines[: starts[0][0]]) if starts else fields.source
    for (at, key), (end, _) in pairwise([*starts, (len(lines), "")]):
        last = end
        while last > at + 1 and (lines[last - 1].isspace() or lines[last - 1][0] == "#"):
            last -= 1
        own[key], above[key] = "".join(lines[at:last]), remarks
        remarks = "".join(lines[last:end])
    return own, {**above, None: remarks}


@dataclass
class _Work:
    """The fields as far as they are repaired: `values` is what they shall mean.

    `own` has the lines of those that stay as they are written, `above` the remarks above them.
    """

    fields: Fields
    values: dict[str, Json]
    own: dict[str, str]
    above: dict[str | None, str]
    changes: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])

    def repair(self, folder_name: str, *, everything: bool) -> None:
        if self.fields.quoted:
            self.changes.append("put values in quotes")
        if not self.own and self.values:
            self.values = {key: _without_empty(value) for key, value in self.values.items()}
            self.changes.append("wrote one field to a line")
        self._name(folder_name)
        self._texts(folder_name)
        self._unknown_fields(everything=everything)
        for key in self.own.keys() & self.fields.flows.keys():
            self._write(key, _without_empty(self.values[key]), f"wrote {key} one item to a line")

    def _write(self, key: str, value: Json, change: str) -> None:
        self.values[key] = value
        self.own.pop(key, None)
        self.changes.append(change)

    def _name(self, folder_name: str) -> None:
        name = self.values.get("name")
        wanted = _wanted_name(name if isinstance(name, str) else "", folder_name)
        if wanted and wanted != name:
            first = next(iter(self.values), "name")
            self.above["name"] = self.above.pop(first, "") + self.above.pop("name", "")
            self.values = {"name": "", **self.values}
            self._write("name", wanted, f"gave it the name {wanted}")

    def _texts(self, folder_name: str) -> None:
        for key in ("description", "license", "compatibility", "argument-hint"):
            value = self.values.get(key)
            if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
                joined = ", ".join(map(str, value))
                # Hints are shown in brackets, which YAML takes for a list.
                text = f"[{joined}]" if key == "argument-hint" else joined
                self._write(key, text, f"made one text of {key}")
        value = self.values.get("allowed-tools")
        words = " ".join(front_of(self.values, folder_name).allowed_tools)
        if isinstance(value, str | list) and value not in ("", words):
            self._write("allowed-tools", words, "made one text of allowed-tools, divided by spaces")

    def _unknown_fields(self, *, everything: bool) -> None:
        unknown = [key for key in self.values if key not in STANDARD]
        self.kept = [] if everything else [key for key in unknown if key in CLIENT_FIELDS]
        moved = [key for key in unknown if key not in self.kept]
        if not moved:
            return
        value = _without_empty(self.values.get("metadata", ""))
        metadata: dict[str, Json] = {"metadata": value} if value else {}
        if isinstance(value, dict):
            metadata = value
        for key in moved:
            free = key
            while free in metadata:
                free += "-field"
            metadata[free] = _without_empty(self.values.pop(key))
            self.own.pop(key, None)
            self.above["metadata"] = self.above.get("metadata", "") + self.above.pop(key, "")
        more = f" and {len(moved) - _MAX_NAMED} more" if len(moved) > _MAX_NAMED else ""
        named = ", ".join(key[:40] for key in moved[:_MAX_NAMED]) + more
        self._write("metadata", metadata, f"moved {named} into metadata")


def _without_empty(value: Json) -> Json:
    """Return the value as lines can say it: they have no empty list or mapping, only empty text."""
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items()} if value else ""
    if isinstance(value, list):
        return [_without_empty(each) for each in value] if value else ""
    return value


def _wanted_name(name: str, folder_name: str) -> str:
    """Return the name that the skill should have; "" to leave it as it is."""
    if _is_good_name(folder_name):
        same = unicodedata.normalize("NFKC", name) == unicodedata.normalize("NFKC", folder_name)
        return name if same else folder_name
    slug = "-".join(re.findall(r"\w+", (name or folder_name).lower().replace("_", "-")))
    return slug if _is_good_name(slug) and not _is_good_name(name) else ""


def _is_good_name(name: str) -> bool:
    name = unicodedata.normalize("NFKC", name)
    fits = 0 < len(name) <= NAME_CHARACTERS and name == name.lower()
    return fits and all(part.isalnum() for part in name.split("-"))
