"""Repairs the front matter of a document so that strict readers take it too. Pure.

Nothing is lost: the body stays byte for byte, fields that are in order stay as they are written,
and a repair whose values are not the ones from before is not made. What cannot be known (a missing
description, which of two keys is meant) is left to a person.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from mcp_sandbox.skills import front_matter, quoting, rules
from mcp_sandbox.skills.block_yaml import without_empty, written
from mcp_sandbox.skills.core_schema import as_json
from mcp_sandbox.skills.front_matter import Fields, Parts, Refused
from mcp_sandbox.skills.models import Diagnostic, Json
from mcp_sandbox.skills.parse import parse

CLIENT_FIELDS = frozenset(
    {
        "agent", "argument-hint", "arguments", "context", "disable-model-invocation",
        "disallowed-tools", "hooks", "model", "paths", "user-invocable",
    }
)  # fmt: skip
"""Fields beside the standard that clients act on: elsewhere they would mean nothing any more."""
_LINE = re.compile(
    r"[^\r\n\x85\u2028\u2029]*(?:\r\n?|[\n\x85\u2028\u2029])|[^\r\n\x85\u2028\u2029]+\Z"
)
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
        mended = quoting.read_mended(front_matter.text(parts), parts.line)
        work = _Work(mended.source, mended.fields, parts.line, everything)
        if mended.lines:
            work.changes.append("put values in quotes")
        work.repair_fields(folder_name)
        repaired = _assembled(parts, work)
        _check_same(repaired, parts.body, work.values)
    except Refused as refused:
        return Repair(data, problem=refused.diagnostic)
    changes = [_FENCES[each.code] for each in parts.oddities if each.code in _FENCES]
    changes += work.changes
    return Repair(repaired if changes else data, tuple(changes), tuple(work.kept))


def _assembled(parts: Parts, work: "_Work") -> bytes:
    """The whole document; the line of the second fence ends as it did."""
    end = _LAST_LINE_END.search(parts.head)
    head = f"---{work.eol}{work.text()}---".encode()
    return head + (end[0] if end else b"") + parts.body


def _check_same(data: bytes, body: bytes, expected: Mapping[str, Json]) -> None:
    parts = front_matter.split(data)
    found = front_matter.read(front_matter.text(parts)).values
    same = found == expected and as_json(dict(found)) == as_json(dict(expected))
    if not same or parts.body != body:
        reason = "The front matter is written in a way that cannot be repaired without harm."
        fix = "Write each field as a plain `key: value` line."
        raise Refused(Diagnostic("not-repairable", "error", reason, fix))


@dataclass
class _Work:
    """The fields with their text, as far as they are repaired.

    `blocks` has each field's lines, with the comments below it; `values` what they shall mean.
    """

    source: str
    fields: Fields
    line: int
    everything: bool
    changes: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    blocks: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, Json] = field(default_factory=dict[str, Json])

    def __post_init__(self) -> None:
        ends = re.findall(r"\r\n?|\n", self.source)
        self.eol = ends[0] if ends else "\n"
        self.values = dict(self.fields.values)
        lines = _LINE.findall(self.source)
        starts = sorted((at - self.line, key) for key, at in self.fields.lines.items())
        self.preamble = "".join(lines[: starts[0][0]]) if starts else self.source
        for (at, key), (end, _) in pairwise([*starts, (len(lines), "")]):
            self.blocks[key] = "".join(lines[at:end])
        if len({at for at, _ in starts}) < len(starts) or self._is_one_flow():
            self._write_out_all()

    def text(self) -> str:
        """The fields as they are by now, ready for the fence to follow."""
        text = self.preamble + "".join(self.blocks.values())
        # YAML knows line ends that do not end a line for whoever looks for the fence.
        return text if not text or text.endswith(("\n", "\r")) else text + self.eol

    @property
    def metadata(self) -> dict[str, Json]:
        value = self.values.get("metadata")
        return value if isinstance(value, dict) else {}

    def repair_fields(self, folder_name: str) -> None:
        self._name(folder_name)
        self._texts()
        self._allowed_tools(folder_name)
        self._unknown_fields()
        for key, block in self.blocks.items():
            if _has_flow(block):
                self._rewrite(key, without_empty(self.values[key]))
                self.changes.append(f"wrote {key} one item to a line")

    def _is_one_flow(self) -> bool:
        first = next((line for line in _LINE.findall(self.source) if not _is_remark(line)), "")
        return first.lstrip().startswith("{")

    def _write_out_all(self) -> None:
        self.preamble, self.blocks = "", {}
        for key, value in self.values.items():
            self.blocks[key] = ""
            self._rewrite(key, without_empty(value))
        self.changes.append("wrote one field to a line")

    def _rewrite(self, key: str, value: Json) -> None:
        below: list[str] = _LINE.findall(self.blocks.get(key, ""))[1:]
        remarks = list(takewhile(_is_remark, reversed(below)))[::-1]
        self.values[key] = value
        self.blocks[key] = "".join((*written(key, value, "", self.eol), *remarks))

    def _name(self, folder_name: str) -> None:
        name = self.values.get("name")
        wanted = _wanted_name(name if isinstance(name, str) else "", folder_name)
        if wanted and wanted != name:
            blocks = self.blocks
            self.blocks = {"name": blocks.pop("name", ""), **blocks}
            self._rewrite("name", wanted)
            self.changes.append(f"gave it the name {wanted}")

    def _texts(self) -> None:
        """Make one text of what should be one and was written as a list."""
        for key in ("description", "license", "compatibility", "argument-hint"):
            value = self.values.get(key)
            if not isinstance(value, list) or not value:
                continue
            if not all(isinstance(each, str) for each in value):
                continue
            joined = ", ".join(str(each) for each in value)
            # Hints are shown in brackets, which YAML takes for a list.
            self._rewrite(key, f"[{joined}]" if key == "argument-hint" else joined)
            self.changes.append(f"made one text of {key}")

    def _allowed_tools(self, folder_name: str) -> None:
        value = self.values.get("allowed-tools")
        if not isinstance(value, str | list) or value == "":
            return
        document = f"---{self.eol}{self.text()}---{self.eol}"
        front = parse(document.encode(), folder_name).front
        words = " ".join(front.allowed_tools) if front else value
        if words != value and isinstance(words, str):
            self._rewrite("allowed-tools", words)
            self.changes.append("made one text of allowed-tools, divided by spaces")

    def _unknown_fields(self) -> None:
        unknown = [key for key in self.values if key not in rules.STANDARD]
        if not self.everything:
            self.kept = [key for key in unknown if key in CLIENT_FIELDS]
        moved = [key for key in unknown if key not in self.kept]
        if not moved:
            return
        self._open_metadata()
        for key in moved:
            self._move(key)
        self.changes.append(f"moved {_named(moved)} into metadata")

    def _open_metadata(self) -> None:
        """Let metadata be there as lines of keys and values."""
        value = self.values.get("metadata")
        if value is None or value in ("", [], {}):
            self.values["metadata"], self.blocks["metadata"] = {}, f"metadata:{self.eol}"
        elif not isinstance(value, dict):
            self._rewrite("metadata", {"metadata": without_empty(value)})
        elif _has_flow(self.blocks["metadata"]):
            self._rewrite("metadata", without_empty(value))

    def _move(self, key: str) -> None:
        value, block = self.values.pop(key), self.blocks.pop(key)
        new = _free(key, self.metadata)
        indent = _indent_of(self.blocks["metadata"])
        if new != key or _has_flow(block):
            value = without_empty(value)
            block = "".join(written(new, value, indent, self.eol))
        else:
            block = "".join(
                indent + line if line.strip() else line for line in _LINE.findall(block)
            )
        self.values["metadata"] = {**self.metadata, new: value}
        self.blocks["metadata"] = self.blocks["metadata"] + block


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return ", ".join(key[:40] for key in keys[:_MAX_NAMED]) + more


def _wanted_name(name: str, folder_name: str) -> str:
    """The name that it should have; "" where the folder's name cannot be one."""
    if _is_good_name(folder_name):
        same = unicodedata.normalize("NFKC", name) == unicodedata.normalize("NFKC", folder_name)
        return name if same else folder_name
    slug = "-".join(re.findall(r"\w+", (name or folder_name).lower().replace("_", "-")))
    return slug if _is_good_name(slug) and not _is_good_name(name) else ""


def _is_good_name(name: str) -> bool:
    name = unicodedata.normalize("NFKC", name)
    fits = 0 < len(name) <= rules.NAME_CHARACTERS and name == name.lower()
    return fits and all(part.isalnum() for part in name.split("-"))


def _is_remark(line: str) -> bool:
    return not line.strip() or line.startswith("#")


def _has_flow(block: str) -> bool:
    return front_matter.read(block).flow is not None


def _indent_of(block: str) -> str:
    """The indentation of the keys of a mapping that stands below its own key."""
    lines: list[str] = _LINE.findall(block)
    for line in lines[1:]:
        if not line.lstrip().startswith("#") and line.strip():
            return line[: len(line) - len(line.lstrip(" "))]
    return "  "


def _free(key: str, taken: Mapping[str, Json]) -> str:
    while key in taken:
        key += "-field"
    return key
