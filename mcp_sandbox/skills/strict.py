"""What the reference tool `skills-ref` 0.1.1 refuses. Its verdict gates nothing here.

The verdict is the same on everything, with the tool's own mistakes: it divides the file at the
first three dashes after the first, wherever they are. It differs where the tool ends in an error of
Python's instead of a verdict (bytes that are not UTF-8, control characters, deep nesting), and
where it would read without bounds: all these are invalid here. Otherwise only corners of YAML are
known to differ: an entry without a key (`: value`), and U+0085, U+2028 and U+2029 in keys and
block texts. Pure: bytes in, diagnostics out.
"""

from collections.abc import Iterator
from dataclasses import replace

from mcp_sandbox.skills import parse, rules, strict_yaml
from mcp_sandbox.skills.front_matter import Fields, Refused
from mcp_sandbox.skills.models import Diagnostic

_SPELLINGS = ("SKILL.md", "skill.md")
_WARNED_OF = frozenset(
    {"no-name", "name-case", "name-hyphens", "name-characters", "name-too-long", "name-mismatch"}
)
"""What makes a skill invalid, and is but a warning where skills are loaded."""


def verdict(data: bytes, folder_name: str, document: str = "SKILL.md") -> tuple[Diagnostic, ...]:
    """What keeps a document from being valid, spelled so in a folder of that name."""
    if document not in _SPELLINGS:
        reason = f"The tool does not look for a document that is spelled {document!r}."
        return (_error("spelling", reason, "Rename it to SKILL.md.", None),)
    try:
        fields = strict_yaml.read(_yaml(data))
    except Refused as refused:
        return (refused.diagnostic,)
    return tuple(_faults(fields, folder_name))


def _yaml(data: bytes) -> str:
    """What stands between the first three dashes and the next."""
    try:
        text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        reason, fix = "The file is not UTF-8.", "Save the file as UTF-8."
        raise Refused(_error("not-utf-8", reason, fix, line)) from error
    if not text.startswith("---"):
        reason = "The file does not begin with three dashes."
        raise Refused(_error("no-front-matter", reason, "Let nothing stand before them.", 1))
    parts = text.split("---", 2)
    if len(parts) < 3:
        fix = "Put a line of three dashes after the last field."
        raise Refused(_error("unclosed", "The front matter does not end.", fix, 1))
    return parts[1]


def _faults(fields: Fields, folder_name: str) -> Iterator[Diagnostic]:
    front = parse.front_of(fields.values, folder_name)
    for each in rules.of_fields(fields, front, folder_name):
        if each.level == "error" or each.code in _WARNED_OF:
            yield replace(each, level="error")
    yield from _of_texts(fields)
    unknown = sorted(set(fields.values) - set(rules.STANDARD))
    if unknown:
        reason = f"The standard does not have the field {unknown[0]!r:.80}."
        fix = "Move it under metadata."
        yield _error("unknown-field", reason, fix, fields.lines[unknown[0]])


def _of_texts(fields: Fields) -> Iterator[Diagnostic]:
    """The tool counts blanks and line ends around a text too."""
    for name, limit in _TEXTS.items():
        value = fields.values.get(name, "")
        line = fields.lines.get(name)
        if not isinstance(value, str):
            yield _error("not-text", f"The field {name} is not a text.", "Write one text.", line)
        elif len(value) > limit:
            reason = f"The {name} has {len(value):,} characters; {limit:,} are the limit."
            yield _error(f"{name}-too-long", reason, "Shorten it.", line)


_TEXTS = {
    "description": rules.DESCRIPTION_CHARACTERS,
    "compatibility": rules.COMPATIBILITY_CHARACTERS,
}


def _error(code: str, reason: str, fix: str, line: int | None = None) -> Diagnostic:
    return Diagnostic(code, "error", reason, fix, line)
