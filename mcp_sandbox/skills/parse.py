"""Reads a `SKILL.md`: what can be used is used, and what is wrong with it is said. Pure."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcp_sandbox.skills import front_matter, quoting, rules
from mcp_sandbox.skills.front_matter import Fields, Parts, Refused
from mcp_sandbox.skills.models import Diagnostic, FrontMatter, Json

# A description that is not quoted, and what YAML leaves out of it.
_COMMENTED = re.compile(r"^description:[ \t]+[^\s'\"|>#][^\r\n]*?[ \t]#", re.MULTILINE)
_PIECES = re.compile(r"[^\s,()]+|\s+|[,()]")


@dataclass(frozen=True)
class Parsed:
    """A document that has been read.

    `front` is None where the skill cannot be used, and then one of `diagnostics` is an error.
    `body_at` is the byte at which the text after the front matter begins.
    """

    front: FrontMatter | None
    body_at: int
    diagnostics: tuple[Diagnostic, ...]


def parse(
    data: bytes, folder_name: str, document: str = "SKILL.md", *, size: int | None = None
) -> Parsed:
    """Read the document of the skill in the folder `folder_name`, where it is spelled `document`.

    `data` may be only the beginning of the `size` bytes that the file has; the first
    `front_matter.HEAD_BYTES` are enough. The body's text is not looked at: `rules.of_body` does.
    """
    size = len(data) if size is None else size
    parts = front_matter.split(data, cut=size > len(data))
    found = list(parts.oddities)
    front = None
    try:
        fields = _fields(parts, found)
        front = front_of(fields.values, folder_name)
        found += rules.of_fields(fields, front, folder_name)
    except Refused as refused:
        found.append(refused.diagnostic)
    found += rules.of_document(document, size - len(parts.head) if parts.head else 0)
    if document != "SKILL.md":
        found = [replace(each, file=document) for each in found]
    if any(each.level == "error" for each in found):
        front = None
    return Parsed(front, len(parts.head), tuple(found))


def _fields(parts: Parts, found: list[Diagnostic]) -> Fields:
    """The fields; where they are not YAML, with the values quoted that need it."""
    source = front_matter.text(parts)
    if "#" in source and (comment := _COMMENTED.search(source)):
        line = parts.line + source.count("\n", 0, comment.end())
        reason = "The description ends before ` #`, where YAML begins a comment."
        found.append(
            Diagnostic("comment", "note", reason, "Put it in quotes, if it goes on.", line)
        )
    mended = quoting.read_mended(source, parts.line)
    reason = "A value has a colon or begins with a special character, and is not quoted."
    fix = "Put the value in quotes."
    found += [
        Diagnostic("unquoted", "warning", reason, fix, parts.line + at) for at in mended.lines
    ]
    return mended.fields


def front_of(values: Mapping[str, Json], folder_name: str) -> FrontMatter:
    """The front matter that those fields make, in a folder of that name."""
    metadata = values.get("metadata")
    return FrontMatter(
        name=unicodedata.normalize("NFKC", _text(values, "name") or folder_name),
        description=_text(values, "description") or ", ".join(_texts(values, "description")),
        fields=values,
        license=_text(values, "license"),
        compatibility=_text(values, "compatibility"),
        metadata=metadata if isinstance(metadata, dict) else {},
        allowed_tools=_words(values, "allowed-tools"),
        arguments=_words(values, "arguments"),
        argument_hint=_text(values, "argument-hint") or _bracketed(values, "argument-hint"),
        user_invocable=_text(values, "user-invocable").lower() not in rules.NO,
        model_invocable=_text(values, "disable-model-invocation").lower() not in rules.YES,
    )


def _text(values: Mapping[str, Json], field: str) -> str:
    value = values.get(field)
    return value.strip() if isinstance(value, str) else ""


def _texts(values: Mapping[str, Json], field: str) -> list[str]:
    value = values.get(field)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _bracketed(values: Mapping[str, Json], field: str) -> str:
    texts = _texts(values, field)
    return f"[{', '.join(texts)}]" if texts else ""


def _words(values: Mapping[str, Json], field: str) -> tuple[str, ...]:
    """The words of a list or of a text, divided at blanks and commas outside parentheses."""
    if field not in values:
        return ()
    texts = [_text(values, field), *_texts(values, field)]
    return tuple(word for text in texts for word in _divided(text))


def _divided(text: str) -> list[str]:
    words: list[str] = []
    word, depth = "", 0
    for piece in _PIECES.findall(text):
        depth = max(0, depth + (piece == "(") - (piece == ")"))
        if depth or not (piece.isspace() or piece == ","):
            word += piece
        elif word:
            words.append(word)
            word = ""
    return [*words, word] if word else words
