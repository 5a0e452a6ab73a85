"""JSON text that is changed at one place: order, spacing and all other values stay as they are.

Only what the standard allows is touched: a file with comments would lose them in other hands, so
it is refused.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcp_sandbox.errors import ConfigError

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class _Member:
    """A name and its value in the text; `end` is behind the value."""

    name: str
    start: int
    value: int
    end: int


def check(text: str) -> None:
    """Make sure that the text is a JSON object.

    Raises:
        ConfigError: it is not; the message says where it goes wrong.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"line {exc.lineno} is not plain JSON ({exc.msg.lower()})") from exc
    except RecursionError as exc:
        raise ConfigError("it is nested too deeply") from exc
    except ValueError as exc:
        raise ConfigError("it holds a number of thousands of digits") from exc
    if not isinstance(found, dict):
        raise ConfigError("it holds no JSON object")


def get(text: str, names: Sequence[str]) -> object:
    """Return the value below these names, or None.

    Raises:
        ConfigError: something on the way to it is not an object.
    """
    place = _object(text, 0)
    for depth, name in enumerate(names):
        member = _find(text, place, name)
        if member is None:
            return None
        if depth == len(names) - 1:
            return _DECODER.raw_decode(text, member.value)[0]
        place = _object(text, member.value)
    return None


def put(text: str, names: Sequence[str], value: object) -> str:
    """Return the text with this value below these names; objects on the way are made."""
    place = _object(text, 0)
    for depth, name in enumerate(names):
        member = _find(text, place, name)
        if member is None:
            for missing in reversed(names[depth + 1 :]):
                value = {missing: value}
            return _insert(text, place, name, value)
        if depth == len(names) - 1:
            rendered = _render(text, value, _line_indent(text, member.start))
            return text[: member.value] + rendered + text[member.end :]
        place = _object(text, member.value)
    return text


def drop(text: str, names: Sequence[str]) -> str:
    """Return the text without the value below these names."""
    place = _object(text, 0)
    for name in names[:-1]:
        member = _find(text, place, name)
        if member is None:
            return text
        place = _object(text, member.value)
    members = list(_members(text, place))
    index = next((n for n, found in enumerate(members) if found.name == names[-1]), None)
    if index is None:
        return text
    if len(members) == 1:
        closing = _skip(text, members[0].end)
        return text[: place + 1] + text[closing:]
    if index == 0:
        return text[: members[0].start] + text[members[1].start :]
    return text[: members[index - 1].end] + text[members[index].end :]


def _object(text: str, at: int) -> int:
    at = _skip(text, at)
    if text[at] != "{":
        raise ConfigError("it holds something else where its servers should be listed")
    return at


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _find(text: str, place: int, name: str) -> _Member | None:
    # Of members with the same name readers take the last one.
    return {member.name: member for member in _members(text, place)}.get(name)


def _members(text: str, place: int) -> Iterator[_Member]:
    at = _skip(text, place + 1)
    while text[at] != "}":
        start = at
        name, at = _DECODER.raw_decode(text, start)
        value = _skip(text, _skip(text, at) + 1)
        end = _DECODER.raw_decode(text, value)[1]
        yield _Member(name, start, value, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _insert(text: str, place: int, name: str, value: object) -> str:
    members = list(_members(text, place))
    if members:
        before = text[place + 1 : members[0].start]
        indent = before.rpartition("\n")[2] if "\n" in before else None
        member = f"{json.dumps(name)}: {_render(text, value, indent)}"
        # What stood on one line stays on one line.
        between = before if indent is not None else " "
        return f"{text[: members[-1].end]},{between}{member}{text[members[-1].end :]}"
    closing = _skip(text, place + 1)
    outer = _line_indent(text, place)
    if outer is None:
        member = f"{json.dumps(name)}: {_render(text, value, None)}"
    else:
        line, inner = _newline(text), outer + _unit(text)
        member = f"{line}{inner}{json.dumps(name)}: {_render(text, value, inner)}{line}{outer}"
    return text[: place + 1] + member + text[closing:]


def _render(text: str, value: object, indent: str | None) -> str:
    """The value as text in the style of the file; `indent` None: on one line."""
    if indent is None:
        return json.dumps(value, ensure_ascii=False)
    lines = json.dumps(value, indent=_unit(text), ensure_ascii=False).split("\n")
    return (_newline(text) + indent).join(lines)


def _line_indent(text: str, at: int) -> str | None:
    """The white space that begins the line of this place; None if the file is one line."""
    if "\n" not in text.strip() and text.strip() != "{}":
        return None
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _unit(text: str) -> str:
    """One level of indentation, as the file has it."""
    first = next(_members(text, _object(text, 0)), None)
    if first is None:
        return "  "
    line = text[text.rfind("\n", 0, first.start) + 1 : first.start]
    return line if line and not line.strip() else "  "


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
