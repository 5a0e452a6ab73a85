"""What an agent does: the events of a run, the last of which is its Completion.

Their values come from a program in the sandbox: one of another type than its field is a ValueError.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic.dataclasses import dataclass

SHOWN = 200
MAX_LINE = 32 << 20
"""The longest line in bytes that is read: as much as a model service takes at once."""


@dataclass(frozen=True)
class Started:
    """The program is at work; `session_id` is its name of the conversation."""

    session_id: str
    model: str = ""


@dataclass(frozen=True)
class Text:
    """What the agent says. A text that was told in `partial` pieces is not told again."""

    text: str
    partial: bool = False


@dataclass(frozen=True)
class ToolCall:
    """The agent uses a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What the tool call of this `id` gave."""

    id: str
    content: str
    is_error: bool = False


@dataclass(frozen=True)
class HostTool:
    """A tool of the host was used."""

    name: str
    duration_ms: int
    is_error: bool = False


@dataclass(frozen=True)
class Notice:
    """What a person may want to know: a retry, a limit, something left out."""

    text: str


@dataclass(frozen=True)
class Progress:
    """What goes on beside the conversation, such as the words of a sub-agent; "" ends it."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """A line that was not understood: its type, if it has one, and its first 200 bytes."""

    type: str
    raw: str


@dataclass(frozen=True)
class Usage:
    """Tokens; `cached` ones are part of the `input`."""

    input: int = 0
    output: int = 0
    total: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Completion:
    """The agent's last words, or of a run that failed what there was of them.

    `reason` says why it failed: a word such as timeout or max_turns, a colon, and a sentence.
    """

    content: str
    is_error: bool = False
    reason: str = ""
    usage: Usage = Usage()
    cost_usd: float | None = None
    turns: int = 0
    duration_ms: int = 0
    session_id: str = ""


Event = Started | Text | ToolCall | ToolResult | HostTool | Notice | Progress | Unknown | Completion


def parse_line(line: bytes, read: Callable[[Any], Iterable[Event]]) -> list[Event]:
    """Read a line of JSON by `read`, which may fail in any way; then it is Unknown."""
    kind = ""
    try:
        event = json.loads(line)
        kind = "/".join(str(event[key])[:80] for key in ("type", "subtype") if key in event)
        return list(read(event))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return [Unknown(kind, line[:SHOWN].decode("utf-8", "replace"))]


class LineDecoder:
    """The lines of a stream that comes in pieces, but for blank ones."""

    def __init__(self) -> None:
        self._line, self._size, self._dropped = bytearray(), 0, 0

    def feed(self, data: bytes) -> Iterator[bytes | Notice]:
        """Yield the lines that end in this piece; of one over MAX_LINE only that it is left out."""
        for number, part in enumerate(data.split(b"\n")):
            if number:
                if self._size > MAX_LINE:
                    self._dropped += 1
                    most = f"{MAX_LINE >> 20} MiB"
                    yield Notice(f"left out: line of over {most} (number {self._dropped})")
                elif self._line.strip():
                    yield bytes(self._line)
                self._line, self._size = bytearray(), 0
            self._size += len(part)
            if self._size <= MAX_LINE:
                self._line += part
            else:
                self._line.clear()
