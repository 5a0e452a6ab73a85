"""Reads a `SKILL.md` leniently, and reports everything that is wrong with it. Pure."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.front_matter import Fields, InvalidFrontMatter, SplitDocument, shorten_value
from mcp_sandbox.skills.skill import Diagnostic, FrontMatter, Json, Level

NAME_CHARACTERS = 64
DESCRIPTION_CHARACTERS = 1024
COMPATIBILITY_CHARACTERS = 500
ARGUMENTS = 32
"""How many arguments of a skill are asked for and put into its text."""
BODY_LINES = 500
BODY_TOKENS = 5000
BYTES_OF_A_TOKEN = 4
STANDARD = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
YES = frozenset({"true", "yes", "on", "y", "1"})
NO = frozenset({"false", "no", "off", "n", "0"})

HIDDEN = re.compile(
    r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]|(?<![^\x00-\x7f])[\u200c\u200d]"
)
"""Characters that show nothing or turn the direction of text: what hides text from a reader."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_UNSEEN = (("control-character", CONTROL), ("hidden-character", HIDDEN))
_NO_FOLDER = re.compile(r"[/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\A\.")
_XML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_MAX_NAMED = 10
# A line's end is found faster than its beginning.
_FENCE_OR_HEADING = re.compile(r"\n {0,3}(?:(`{3,}|~{3,})|#{1,6}[ \t]+(\S.*))")
_NAME = "Use 1 to 64 lower-case letters and digits, in groups joined by single hyphens."
# A description that is not quoted, and what YAML leaves out of it.
_COMMENTED = re.compile(r"^description:[ \t]+[^\s'\"|>#][^\r\n]*?[ \t]#", re.MULTILINE)
_PIECES = re.compile(r"[^\s,()]+|\s+|[,()]")


@dataclass(frozen=True)
class ParsedSkill:
    """A document that has been read.

    `front` is None where the skill cannot be used, and then one of `diagnostics` is an error.
    `body_at` is the byte at which the text after the front matter begins.
    """

    front: FrontMatter | None
    body_at: int
    diagnostics: tuple[Diagnostic, ...]


def parse(
    data: bytes, folder_name: str, document: str = "SKILL.md", *, size: int | None = None
) -> ParsedSkill:
    """Read the document of the skill in the folder `folder_name`, where it is spelled `document`.

    `data` may be only the beginning of the `size` bytes that the file has; the first
    `front_matter.HEAD_BYTES` are enough. The body's text is not looked at: `of_body` does.
    """
    size = len(data) if size is None else size
    parts = front_matter.split(data, cut=size > len(data))
    found = list(parts.oddities)
    front = None
    try:
        fields = _fields(parts, found)
        front = _front_of(fields.values, folder_name)
        found += _of_fields(fields, front, folder_name)
    except InvalidFrontMatter as refused:
        found.append(refused.diagnostic)
    if document != "SKILL.md":
        reason = f"The file is spelled {document!r}, which many clients do not look for."
        found.append(Diagnostic("spelling", "warning", reason, "Rename it to SKILL.md."))
    tokens = (size - len(parts.head)) // BYTES_OF_A_TOKEN if parts.head else 0
    if tokens > BODY_TOKENS:
        found.append(_long_body(f"about {tokens:,} tokens", f"{BODY_TOKENS:,}"))
    if document != "SKILL.md":
        found = [replace(each, file=document) for each in found]
    if any(each.level == "error" for each in found):
        front = None
    return ParsedSkill(front, len(parts.head), tuple(found))


def _fields(parts: SplitDocument, found: list[Diagnostic]) -> Fields:
    source = front_matter.text(parts)
    if "#" in source and (comment := _COMMENTED.search(source)):
        line = parts.line + source.count("\n", 0, comment.end())
        reason = "The description ends before ` #`, where YAML begins a comment."
        fix = "Put it in quotes, if it goes on."
        found.append(Diagnostic("comment", "note", reason, fix, line))
    fields = front_matter.read_leniently(parts)
    if broken := fields.broken:
        reason = f"{broken.reason} Only its fields of one text each are read."
        found.append(replace(broken, level="warning", reason=reason))
    return fields


def _front_of(values: Mapping[str, Json], folder_name: str) -> FrontMatter:
    """Return the front matter with these fields, for a skill in a folder of that name."""
    metadata, hint = values.get("metadata"), _texts(values, "argument-hint")
    return FrontMatter(
        name=unicodedata.normalize("NFKC", _text(values, "name") or folder_name),
        description=_text(values, "description") or ", ".join(_texts(values, "description")),
        fields=values,
        license=_text(values, "license"),
        compatibility=_text(values, "compatibility"),
        metadata=metadata if isinstance(metadata, dict) else {},
        allowed_tools=_words(values, "allowed-tools"),
        arguments=_words(values, "arguments"),
        argument_hint=_text(values, "argument-hint") or (f"[{', '.join(hint)}]" if hint else ""),
        user_invocable=_text(values, "user-invocable").lower() not in NO,
        model_invocable=_text(values, "disable-model-invocation").lower() not in YES,
    )


def _text(values: Mapping[str, Json], field: str) -> str:
    value = values.get(field)
    return value.strip() if isinstance(value, str) else ""


def _texts(values: Mapping[str, Json], field: str) -> list[str]:
    value = values.get(field)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _words(values: Mapping[str, Json], field: str) -> tuple[str, ...]:
    """Return the words of a list or text, split at blanks and commas outside parentheses."""
    words: list[str] = []
    for text in (_text(values, field), *_texts(values, field)):
        word, depth = "", 0
        for piece in (*_PIECES.findall(text), None):
            depth = max(0, depth + (piece == "(") - (piece == ")"))
            if piece and (depth or not (piece.isspace() or piece == ",")):
                word += piece
            elif word:
                words.append(word)
                word = ""
    return tuple(words)


def _of_fields(fields: Fields, front: FrontMatter, folder_name: str) -> Iterator[Diagnostic]:
    yield from _of_name(fields, front.name, folder_name)
    yield from _of_description(fields, front.description)
    yield from _of_types(fields)
    if len(front.compatibility) > COMPATIBILITY_CHARACTERS:
        yield _too_long(fields, "compatibility", front.compatibility, COMPATIBILITY_CHARACTERS)
    if len(front.arguments) > ARGUMENTS:
        reason = f"It takes {len(front.arguments):,} arguments; only the first {ARGUMENTS} count."
        fix = "Take fewer, or one that holds them all."
        yield _at(fields, "too-many-arguments", "warning", reason, fix, "arguments")
    yield from _of_style(fields)


def of_body(body: bytes, first_line: int = 1) -> Iterator[Diagnostic]:
    """Yield what is wrong with the text after the front matter, which begins in that line."""
    lines = body.count(b"\n")
    if lines > BODY_LINES and len(body) // BYTES_OF_A_TOKEN <= BODY_TOKENS:
        yield _long_body(f"{lines:,} lines", f"{BODY_LINES:,}")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        reason = f"The body is not UTF-8: byte 0x{body[error.start]:02x}."
        line = first_line + body.count(b"\n", 0, error.start)
        yield Diagnostic("not-utf-8", "warning", reason, "Save the file as UTF-8.", line)
        text = body.decode(errors="replace")
    for code, pattern in _UNSEEN:
        if match := pattern.search(text):
            line = first_line + text.count("\n", 0, match.start())
            yield _character(code, "The body", match, line)


def list_headings(body: bytes) -> str:
    """Return the first headings of a text, one to a line, without those in blocks of code."""
    lines = body.decode("utf-8", "replace").splitlines() if b"#" in body else ()
    found, fence = list[str](), ""
    for mark, heading in _FENCE_OR_HEADING.findall("\n".join(("", *lines))):
        if mark and (not fence or mark.startswith(fence)):
            fence = "" if fence else mark
        elif heading and not fence:
            found.append(heading.rstrip("# \t")[:120])
    return "\n".join(found[:64])[:4000]


def _of_name(fields: Fields, name: str, folder_name: str) -> Iterator[Diagnostic]:
    written = fields.values.get("name")
    if not isinstance(written, str) or not written.strip():
        reason = "The front matter has no name that is text; the folder's is used."
        yield _at(fields, "no-name", "warning", reason, "Add a line such as `name: my-skill`.")
    if _NO_FOLDER.search(name) or len(name.encode(errors="replace")) > 255:
        reason = f"No folder can have the name {shorten_value(name)}."
        yield _at(fields, "name-unusable", "error", reason, _NAME)
        return
    if not name.isascii() and (hidden := HIDDEN.search(name)):
        yield _character("hidden-character", "The name", hidden, fields.lines.get("name"), "error")
        return
    if name != name.lower():
        yield _at(fields, "name-case", "warning", "The name has upper-case letters.", _NAME)
    if name[:1] == "-" or name[-1:] == "-" or "--" in name:
        reason = "The name begins or ends with a hyphen, or has two in a row."
        yield _at(fields, "name-hyphens", "warning", reason, _NAME)
    if not all(each.isalnum() or each == "-" for each in name):
        reason = "The name has other characters than letters, digits and hyphens."
        yield _at(fields, "name-characters", "warning", reason, _NAME)
    if len(name) > NAME_CHARACTERS:
        yield _too_long(fields, "name", name, NAME_CHARACTERS)
    if name != folder_name and name != unicodedata.normalize("NFKC", folder_name):
        reason = f"The name is {shorten_value(name)} and the folder's {shorten_value(folder_name)}."
        yield _at(fields, "name-mismatch", "warning", reason, "Give both the same name.")
    if "claude" in name or "anthropic" in name:
        reason = "The name has a word that Anthropic keeps for itself."
        yield _at(fields, "name-reserved", "note", reason, "Choose another to publish it there.")


def _of_description(fields: Fields, description: str) -> Iterator[Diagnostic]:
    if not description:
        reason = "The front matter has no description, by which a skill is chosen."
        fix = "Add a line `description: …` that says what it does and when to use it."
        yield _at(fields, "no-description", "error", reason, fix, "description")
    if len(description) > DESCRIPTION_CHARACTERS:
        yield _too_long(fields, "description", description, DESCRIPTION_CHARACTERS)
    # Whatever the two patterns find is not printable.
    for code, pattern in _UNSEEN if not description.isprintable() else ():
        if match := pattern.search(description):
            yield _character(code, "The description", match, fields.lines.get("description"))
    if "<" in description and (tag := _XML_TAG.search(description)):
        reason = (
            f"The description has the XML tag {shorten_value(tag[0])}, which some clients refuse."
        )
        yield _at(fields, "xml-tag", "note", reason, "Leave it out.", "description")


def _of_types(fields: Fields) -> Iterator[Diagnostic]:
    for name in ("description", "license", "compatibility", "allowed-tools"):
        value = fields.values.get(name, "")
        if not isinstance(value, (str, list) if name == "allowed-tools" else str):
            reason = f"The field {name} is not a text."
            yield _at(fields, "not-text", "warning", reason, "Write it as one text.", name)
    if not isinstance(fields.values.get("metadata", {}), dict):
        reason = "The field metadata has no keys and values."
        fix = "Write it as `key: value` lines, indented."
        yield _at(fields, "metadata", "warning", reason, fix, "metadata")
    for name in ("user-invocable", "disable-model-invocation"):
        value = fields.values.get(name)
        if value is not None and str(value).lower() not in YES | NO:
            reason = f"The field {name} says neither true nor false; it is ignored."
            yield _at(fields, "not-yes-or-no", "warning", reason, "Write true or false.", name)


def _of_style(fields: Fields) -> Iterator[Diagnostic]:
    if unknown := [name for name in fields.values if name not in STANDARD]:
        named = ", ".join(shorten_value(name) for name in unknown[:_MAX_NAMED])
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        reason = f"The standard does not have these fields: {named}{more}."
        fix = "Move them under metadata, unless a client of yours reads them."
        yield _at(fields, "unknown-field", "note", reason, fix, unknown[0])
    if fields.anchor is not None:
        reason = "A value begins with `&name`, which YAML takes for an anchor and leaves out."
        fix = "Put the value in quotes, or delete the anchor."
        yield Diagnostic("anchor", "warning", reason, fix, fields.anchor)
    if fields.flow is not None:
        reason = "A value is written with brackets or braces, which the reference tool refuses."
        fix = "Write one item or key to a line."
        yield Diagnostic("flow-style", "note", reason, fix, fields.flow)


def _at(
    fields: Fields, code: str, level: Level, reason: str, fix: str, field: str = "name"
) -> Diagnostic:
    return Diagnostic(code, level, reason, fix, fields.lines.get(field))


def _too_long(fields: Fields, field: str, value: str, limit: int) -> Diagnostic:
    reason = f"The {field} has {len(value):,} characters; {limit:,} are the standard's limit."
    return _at(fields, f"{field}-too-long", "warning", reason, "Shorten it.", field)


def _long_body(what: str, limit: str) -> Diagnostic:
    reason = f"The body has {what}; {limit} are recommended at most."
    return Diagnostic("body-too-long", "note", reason, "Move parts into files it refers to.")


def _character(
    code: str, where: str, match: re.Match[str], line: int | None, level: Level = "warning"
) -> Diagnostic:
    reason = f"{where} has the {code.replace('-', ' ')} U+{ord(match[0]):04X}."
    return Diagnostic(code, level, reason, "Delete it, or type what was meant.", line)
