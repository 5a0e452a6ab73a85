"""What is wrong with a skill whose front matter could be read. Pure: values in, diagnostics out."""

import re
import unicodedata
from collections.abc import Iterator

from mcp_sandbox.skills.front_matter import Fields
from mcp_sandbox.skills.models import Diagnostic, FrontMatter, Level

NAME_CHARACTERS = 64
DESCRIPTION_CHARACTERS = 1024
COMPATIBILITY_CHARACTERS = 500
ARGUMENTS = 32
"""So many arguments of a skill are asked for and put into its text."""
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
_GOOD_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\Z")
_NO_FOLDER = re.compile(r"[/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\A\.")
_XML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_FOLDER_NAME_BYTES = 255
_KINDS: dict[str, tuple[type, ...]] = {
    "description": (str,),
    "license": (str,),
    "compatibility": (str,),
    "allowed-tools": (str, list),
}
_YES_OR_NO = ("user-invocable", "disable-model-invocation")
_MAX_NAMED = 10


def of_fields(fields: Fields, front: FrontMatter, folder_name: str) -> Iterator[Diagnostic]:
    """What is wrong with the fields, of which `front` was made."""
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


def of_document(document: str, body_bytes: int) -> Iterator[Diagnostic]:
    """What is wrong with how the file is spelled, and with a body of so many bytes."""
    if document != "SKILL.md":
        reason = f"The file is spelled {document!r}, which many clients do not look for."
        yield Diagnostic("spelling", "warning", reason, "Rename it to SKILL.md.")
    if (tokens := body_bytes // BYTES_OF_A_TOKEN) > BODY_TOKENS:
        yield _long_body(f"about {tokens:,} tokens", f"{BODY_TOKENS:,}")


def of_body(body: bytes, first_line: int = 1) -> Iterator[Diagnostic]:
    """What is wrong with the text after the front matter, which begins in that line."""
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


def _of_name(fields: Fields, name: str, folder_name: str) -> Iterator[Diagnostic]:
    written = fields.values.get("name")
    if not isinstance(written, str) or not written.strip():
        reason = "The front matter has no name that is text; the folder's is used."
        yield _at(fields, "no-name", "warning", reason, "Add a line such as `name: my-skill`.")
    if unusable := _unusable(fields, name):
        yield unusable
        return
    if _GOOD_NAME.match(name) is None:
        yield from _of_name_characters(fields, name)
    if len(name) > NAME_CHARACTERS:
        yield _too_long(fields, "name", name, NAME_CHARACTERS)
    if name != folder_name and name != unicodedata.normalize("NFKC", folder_name):
        reason = f"The name is {_short(name)} and the folder's {_short(folder_name)}."
        yield _at(fields, "name-mismatch", "warning", reason, "Give both the same name.")
    if "claude" in name or "anthropic" in name:
        reason = "The name has a word that Anthropic keeps for itself."
        yield _at(fields, "name-reserved", "note", reason, "Choose another to publish it there.")


def _unusable(fields: Fields, name: str) -> Diagnostic | None:
    """Why no folder can have that name, or nobody can type it."""
    if _NO_FOLDER.search(name) or len(name.encode(errors="replace")) > _FOLDER_NAME_BYTES:
        reason = f"No folder can have the name {_short(name)}."
        return _at(fields, "name-unusable", "error", reason, _NAME)
    if not name.isascii() and (hidden := HIDDEN.search(name)):
        line = fields.lines.get("name")
        return _character("hidden-character", "The name", hidden, line, "error")
    return None


def _of_name_characters(fields: Fields, name: str) -> Iterator[Diagnostic]:
    if name != name.lower():
        yield _at(fields, "name-case", "warning", "The name has upper-case letters.", _NAME)
    if name[:1] == "-" or name[-1:] == "-" or "--" in name:
        reason = "The name begins or ends with a hyphen, or has two in a row."
        yield _at(fields, "name-hyphens", "warning", reason, _NAME)
    if not all(each.isalnum() or each == "-" for each in name):
        reason = "The name has other characters than letters, digits and hyphens."
        yield _at(fields, "name-characters", "warning", reason, _NAME)


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
        reason = f"The description has the XML tag {_short(tag[0])}, which some clients refuse."
        yield _at(fields, "xml-tag", "note", reason, "Leave it out.", "description")


def _of_types(fields: Fields) -> Iterator[Diagnostic]:
    for name, kinds in _KINDS.items():
        if not isinstance(fields.values.get(name, ""), kinds):
            reason = f"The field {name} is not a text."
            yield _at(fields, "not-text", "warning", reason, "Write it as one text.", name)
    if not isinstance(fields.values.get("metadata", {}), dict):
        reason = "The field metadata has no keys and values."
        fix = "Write it as `key: value` lines, indented."
        yield _at(fields, "metadata", "warning", reason, fix, "metadata")
    for name in _YES_OR_NO:
        value = fields.values.get(name)
        if value is not None and str(value).lower() not in YES | NO:
            reason = f"The field {name} says neither true nor false; it is ignored."
            yield _at(fields, "not-yes-or-no", "warning", reason, "Write true or false.", name)


def _of_style(fields: Fields) -> Iterator[Diagnostic]:
    unknown = [name for name in fields.values if name not in STANDARD]
    if unknown:
        named = ", ".join(_short(name) for name in unknown[:_MAX_NAMED])
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


_NAME = "Use 1 to 64 lower-case letters and digits, in groups joined by single hyphens."


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
    kind = code.replace("-", " ")
    reason = f"{where} has the {kind} U+{ord(match[0]):04X}."
    return Diagnostic(code, level, reason, "Delete it, or type what was meant.", line)


def _short(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:39] + "…")
