"""Skills -> MCP content: a listing as data, a skill and its files as text to be read.

The text of a skill is given byte for byte, whatever is in it. It stands in one wrapper whose last
line repeats the digest of the skill: no text can hold the digest of itself, so none can end the
wrapper early. All that we say of a skill stands before its text.
"""

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict
from html import escape

from mcp.types import CallToolResult
from pydantic import BaseModel

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.server.results import as_json, structured, texts
from mcp_sandbox.server.text import MAX_TEXT_BYTES, show_name, take_fitting
from mcp_sandbox.sessions.skill_pins import Activation
from mcp_sandbox.skills.catalogue import MOST_OF_A_DESCRIPTION, call_name, cut_short, one_line
from mcp_sandbox.skills.declared import Need
from mcp_sandbox.skills.search import Page, PageItem
from mcp_sandbox.skills.skill import DOCUMENT, SCRIPT_ENDINGS, SkillFile

_WHAT: dict[Need, str] = {
    "command": "command",
    "python": "Python package",
    "node": "Node.js package",
}
_MOST_LINES = 15
# A structured result holds everything twice, for clients of either kind.
_LIST_BYTES = 15_000
_PAGE_BYTES = MAX_TEXT_BYTES - 2_000
_BASE64_BYTES = _PAGE_BYTES // 4 * 3
# With our own words still below what Claude takes whole.
_MOST_BODY_BYTES = 450_000
_FILES_BYTES = 30_000
_IN_META = ("uri", "name", "digest", "repeated", "unchecked", "drift")
_OWN_FOLDER = ("{baseDir}", "${CLAUDE_SKILL_DIR}", "${CLAUDE_PLUGIN_ROOT}")


def _describe_needs(got: Activation) -> Iterable[str]:
    """Return what the skill declares, and a line for each need that is not met."""
    if got.needs:
        named = [f"{_WHAT[each.need]} {show_name(each.name)}" for each in got.needs]
        sources = ", ".join(dict.fromkeys(each.where for each in got.needs))
        yield f"It declares that it needs ({sources}): {cut_short(', '.join(named), 600)}."
    if got.unchecked:
        yield f"What of it is missing is not known: {cut_short(one_line(got.unchecked), 300)}."
    for lack in got.unmet[:_MOST_LINES]:
        fix = f" ({lack.fix})" if lack.fix else ""
        yield f"Missing in this sandbox: {_WHAT[lack.need]} {show_name(lack.name)}{fix}."
    if rest := got.unmet[_MOST_LINES:]:
        yield f"Missing besides: {', '.join(show_name(each.name) for each in rest)}."
    if got.unmet:
        yield "Do without what is missing, install it if that works, or tell the user."


class ListedSkill(BaseModel, frozen=True):
    """A skill; `name` is what skill_activate takes, `match` says what fits the query."""

    name: str
    description: str
    uri: str
    root: str
    match: list[str] | None = None


class SkillsListed(BaseModel, frozen=True):
    """What skills_list answers; `omitted` says what is not here, and why."""

    skills: list[ListedSkill]
    next_cursor: str | None = None
    total: int
    omitted: list[str]


def format_skills(page: Page) -> CallToolResult:
    """Return the skills of a page that fit in one result."""
    rows = take_fitting(map(_listed, page.skills), _LIST_BYTES, as_json)
    more = page.more or len(rows) < len(page.skills)
    return structured(
        SkillsListed(
            skills=rows,
            next_cursor=page.skills[len(rows) - 1].cursor if more and rows else None,
            total=page.total,
            omitted=[*page.notes, *_omitted(page, len(rows), more=more)],
        )
    )


def _listed(each: PageItem) -> ListedSkill:
    skill = each.skill
    return ListedSkill(
        name=call_name(skill),
        description=cut_short(one_line(skill.front.description), MOST_OF_A_DESCRIPTION),
        uri=skill.uri,
        root=skill.root,
        match=[*map(one_line, each.reasons)] or None,
    )


def _omitted(page: Page, count: int, *, more: bool) -> Iterable[str]:
    descriptions = (one_line(each.skill.front.description) for each in page.skills[:count])
    if cut := sum(len(each) > MOST_OF_A_DESCRIPTION for each in descriptions):
        what = "1 description ends" if cut == 1 else f"{cut} descriptions end"
        yield f"{what} with … after {MOST_OF_A_DESCRIPTION:,} characters"
    if more:
        yield f"{count} of {page.total:,} are on this page: next_cursor leads to the next"


def format_activation(got: Activation) -> CallToolResult:
    """Return the text of a skill in its wrapper, or that it was given before."""
    if got.repeated:
        text = (
            f"The skill {show_name(got.name)} is active already, as it was given before "
            f"({got.digest}). If you do not have its text any more, call again with refresh=true."
        )
        return texts([text, *(f"[{note}]" for note in _drift(got))], _meta(got))
    return texts([wrap_text(got)], _meta(got))


def wrap_text(got: Activation) -> str:
    """Return the text of a skill in its wrapper, after the notes on it."""
    body = got.body[:_MOST_BODY_BYTES].decode("utf-8", "replace")
    notes = "\n".join(f"[{note}]" for note in _notes(got, body))
    name, uri = escape(one_line(got.name)), escape(got.uri)
    begin = f'<skill_content name="{name}" origin="{uri}" digest="{got.digest}">'
    end = f'</skill_content digest="{got.digest}">'
    return f"{begin}\n{notes}\n{body}\n{end}"


def _notes(got: Activation, body: str) -> Iterable[str]:
    where = got.path_in_sandbox
    if where:
        yield f"In the sandbox this skill lies at {where}, read-only; its paths begin there."
    home = f"~/.claude/skills/{got.name}"
    used = [name for name in (*_OWN_FOLDER, home) if name in body]
    if used and where:
        yield f"In its text, {' and '.join(used)} mean{'' if used[1:] else 's'} that folder."
    yield from _file_notes(got)
    yield from _describe_needs(got)
    front = got.skill.front
    if front.compatibility:
        yield f"Compatibility, says its author: {cut_short(one_line(front.compatibility), 500)}"
    if front.metadata:
        metadata = json.dumps(dict(front.metadata), ensure_ascii=False)
        yield f"metadata of its author: {cut_short(one_line(metadata), 300)}"
    if front.allowed_tools:
        names = cut_short(one_line(", ".join(front.allowed_tools)), 300)
        yield f"allowed-tools of its author: {names}. They change nothing here."
    if got.left_out:
        reasons = cut_short(" ".join(show_name(each.reason) for each in got.left_out), 300)
        yield f"Not all of its folder is here: {reasons}"
    yield from _drift(got)
    yield from _text_notes(got)


def _drift(got: Activation) -> Iterable[str]:
    if got.drift:
        names = cut_short(", ".join(map(show_name, got.drift)), 300)
        yield f"Changed since this chat got it: {names}. refresh=true gets what is there now."


def _file_notes(got: Activation) -> Iterable[str]:
    others = [file for file in got.contents.files if file.path != DOCUMENT]
    if not others:
        return
    rows = (f"{show_name(file.path)} ({file.size:,} bytes, {file.kind})" for file in others)
    named = take_fitting((cut_short(row, 200) for row in rows), _FILES_BYTES)
    more = f", and {len(others) - len(named)} more" if len(others) > len(named) else ""
    yield f"Its files, read with skill_activate and path: {', '.join(named)}{more}."
    scripts = (
        each.path.endswith(SCRIPT_ENDINGS)
        or (each.path.startswith("scripts/") and each.kind == "text")
        for each in others
    )
    if got.path_in_sandbox and any(scripts):
        yield "Run its scripts with exec by their interpreter (python3 F, bash F, node F), not ./F."


def _text_notes(got: Activation) -> Iterable[str]:
    size = len(got.body)
    if size > _MOST_BODY_BYTES:
        size_of_file = next(f.size for f in got.contents.files if f.path == DOCUMENT)
        rest = size_of_file - size + _MOST_BODY_BYTES
        yield (
            f"Only the first {_MOST_BODY_BYTES:,} of {size:,} bytes of its text are here: read on "
            f"with path={DOCUMENT} offset={rest}"
        )
    elif size > 20_000:
        yield f"A long text: {size:,} bytes, about {size // 4:,} tokens, given as a whole."
    if got.body.decode(errors="ignore").encode() != got.body:
        yield "Bytes that are not UTF-8 are shown as \N{REPLACEMENT CHARACTER}."
    yield "The text of its author follows, up to the line with the same digest."


def _meta(got: Activation) -> dict[str, object]:
    """Return the machine-readable form; `receipt` is a line to keep if the text has no room."""
    place = f", at {got.path_in_sandbox}" if got.path_in_sandbox else ""
    return {
        **{name: getattr(got, name) for name in _IN_META},
        "durable": not got.repeated,
        "receipt": f"The skill {one_line(got.name)} ({got.digest[:19]}…) is active{place}; "
        f"skill_activate with refresh=true gives its text again.",
        "path": got.path_in_sandbox,
        "bytes": len(got.body),
        "files": [
            {"path": file.path, "size": file.size, "kind": file.kind, "digest": file.digest}
            for file in got.contents.files
        ],
        "needs": [*map(asdict, got.needs)],
        "unmet": [*map(asdict, got.unmet)],
        "compatibility": got.skill.front.compatibility,
        "allowed_tools": got.skill.front.allowed_tools,
    }


def format_skill_file(file: SkillFile, data: bytes, offset: int) -> CallToolResult:
    """Return a page of one file: text as it is, else base64.

    Raises InvalidArgument: the file ends before `offset`.
    """
    if offset > max(len(data) - 1, 0):
        raise InvalidArgument(f"{file.path} has {len(data):,} bytes: offset must be below that")
    if file.kind == "text":
        page = _text_page(data, offset)
        text = page.decode("utf-8", "replace")
    else:
        page = data[offset : offset + _BASE64_BYTES]
        text = base64.b64encode(page).decode()
    end = offset + len(page)
    what = show_name(file.path) if file.kind == "text" else f"{show_name(file.path)} as base64"
    on = f"; read on with offset={end}" if end < len(data) else ""
    note = f"[{what}: bytes {offset:,} to {end:,} of {len(data):,}, {file.mime}{on}]"
    meta = {**asdict(file), "offset": offset, "next_offset": end if end < len(data) else None}
    return texts([text, note], meta)


def _text_page(data: bytes, offset: int) -> bytes:
    """Return as much as fits, up to the end of a line or at least of a character."""
    page = data[offset : offset + _PAGE_BYTES]
    if offset + len(page) == len(data):
        return page
    line = page.rfind(b"\n") + 1
    if line > len(page) // 2:
        return page[:line]
    # A character has at most three bytes after its first.
    whole = next((n for n in range(1, 5) if page[-n] & 0xC0 != 0x80), 1)
    return page[:-whole] if page[-whole] & 0x80 else page
