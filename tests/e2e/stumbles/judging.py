"""A call of an everyday session, and whether its answer misleads or is empty."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.server.scripted import text_of

Given = Mapping[str, Any]
# Programs that hints have named; a sandbox need not have them.
PROGRAMS = ("xxd", "strings", "unzip", "hexdump", "iconv", "sqlite3", "pdftotext", "magick")
# In what we say ourselves: refusals, and lines within brackets.
_OURS = re.compile(r"^\[(?!stderr\]).*", re.MULTILINE)
_SLOW_S = 30.0
# Never right: terminal codes and overwritten lines, Node's own files, what repeats our insides.
_NEVER = {
    r"\x1b|\\x1b|\\e\[|\[\d+(;\d+)*m": "terminal codes",
    r"\r|(?<!tr ')\\r|\^M": "a carriage return",
    r"(^.*node:internal.*\n?){3}": "Node's internals",
    r"validation error|pydantic|type=\w+_error": "words of a library",
    r"^\[the file is empty\]": "a file that is not empty is called so",
    r"sandbox had ended": "the sandbox went",
}


@dataclass(frozen=True)
class Step:
    """A call. `given` may be made of the answer before; `wants` are patterns, all to be there.

    `picture`: an image is to come, and only then may one. `refused`: an error is. `only` names
    the backend that it is for.
    """

    tool: str
    given: Given | Callable[[str], Given]
    wants: Sequence[str] = ()
    never: Sequence[str] = ()
    refused: bool = False
    picture: bool = False
    only: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a call was answered, and what is wrong with that."""

    tool: str
    given: Given
    text: str
    pictures: int
    seconds: float
    faults: Sequence[str]


def outcome(
    step: Step, given: Given, result: Any, seconds: float, programs: Sequence[str]
) -> Outcome:
    text = text_of(result)
    pictures = sum(block.type == "image" for block in result.content)
    found = [*_wrong_in(text, step), *_wrong_words(text, step, programs, refused=result.is_error)]
    if bool(pictures) != step.picture:
        found.append("an image was sent" if pictures else "no image was sent")
    if seconds > _SLOW_S:
        found.append(f"took {seconds:.0f} s")
    return Outcome(step.tool, given, text, pictures, seconds, found)


def _wrong_in(text: str, step: Step) -> list[str]:
    if not text.strip():
        return ["empty"]
    lacking = [f"lacks /{want}/" for want in step.wants if not _has(text, want)]
    return lacking + [f"has /{bad}/" for bad in step.never if _has(text, bad)]


def _wrong_words(text: str, step: Step, programs: Sequence[str], *, refused: bool) -> list[str]:
    found = [why for bad, why in _NEVER.items() if _has(text, bad) and bad not in step.wants]
    if refused != step.refused:
        found.append("was refused" if refused else "was not refused")
    ours = text if refused else "\n".join(_OURS.findall(text))
    found += [
        f"a hint names {name}, which is not there"
        for name in PROGRAMS
        if name not in programs and re.search(rf"\b{name}\b", ours)
    ]
    # What is wrong and what to do are two parts of a sentence at least.
    if refused and not re.search(r"[:;,].*\w", text):
        found.append("an error without a way out")
    return found


def _has(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.MULTILINE | re.IGNORECASE) is not None


def suggested(program: str) -> Callable[[str], Given]:
    """The command with that program that the answer before advises to exec."""

    def found(text: str) -> Given:
        command = re.search(rf"`({program} [^`]+)`|({program} -[^;…`\]\n]+)", text)
        advised = command[1] or command[2] if command else f"echo no {program} was advised; false"
        return {"command": advised.strip()}

    return found


def run(command: str, *wants: str, never: Sequence[str] = (), **more: Any) -> Step:
    """A command that is to end well."""
    return Step("exec", {"command": command, **more}, wants, [r"^\[exit code", *never])


def fails(command: str, *wants: str, never: Sequence[str] = (), **more: Any) -> Step:
    """A command that is to fail."""
    return Step("exec", {"command": command, **more}, [r"^\[exit code \d", *wants], never)
