"""The messages of a request, checked, and as an agent program is given them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationError

from mcp_sandbox.config import Section
from mcp_sandbox.errors import InvalidArgument, TooLarge

MOST_BYTES = 24 << 20
"""Of the messages as JSON; with all that its program adds, a model service takes 32 MiB."""


class PromptInput(Section):
    """What a caller gives."""

    @classmethod
    def read(cls, values: Mapping[str, Any], what: str) -> Self:
        """Return the values, checked; InvalidArgument says what is wrong, and what there is."""
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in exc.errors()]
            known = ", ".join(cls.model_fields)
            raise InvalidArgument(
                f"{what} cannot be used: {'; '.join(wrong[:5])}. There are: {known}"
            ) from exc


def _sendable(text: str) -> str:
    if b"\0" in text.encode():
        raise ValueError("it holds a NUL character: remove it")
    return text


def _parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Text(PromptInput):
    type: Literal["text"]
    text: Annotated[str, AfterValidator(_sendable)]


class _Source(PromptInput):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: str = Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")


class _Image(PromptInput):
    type: Literal["image"]
    source: _Source


_Part = Annotated[_Text | _Image, Field(discriminator="type")]


class _Message(PromptInput):
    role: Literal["system", "user", "assistant"]
    content: Annotated[tuple[_Part, ...], FailFast(), BeforeValidator(_parts), Field(min_length=1)]

    def blocks(self) -> list[dict[str, Any]]:
        text = "\n".join(part.text for part in self.content if isinstance(part, _Text))
        images = [part.model_dump() for part in self.content if isinstance(part, _Image)]
        return [{"type": "text", "text": text}, *images]


class _Messages(PromptInput):
    messages: Annotated[tuple[_Message, ...], FailFast()]


@dataclass(frozen=True)
class Conversation:
    """Instructions, and turns of one text and its images, the last of which is the user's."""

    system: str
    turns: Sequence[Mapping[str, Any]]

    @property
    def prompt(self) -> Sequence[Mapping[str, Any]]:
        """The blocks of the last turn, after those of the earlier ones, which tell who spoke."""
        blocks = [{"type": "text", "text": "## Conversation History:"}] if self.turns[1:] else []
        for each in self.turns[:-1]:
            text, *images = each["content"]
            blocks += [{"type": "text", "text": f"[{each['role']}]: {text['text']}"}, *images]
        return [*blocks, *self.turns[-1]["content"]]


def read_conversation(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Read messages in the form of the Messages API, and of the role system too.

    Raises:
        InvalidArgument: it names the message, the part and what is accepted.
        TooLarge: over MOST_BYTES.
    """
    given = _Messages.read({"messages": messages}, "the request").messages
    system = [block for each in given if each.role == "system" for block in each.blocks()]
    talk = [each for each in given if each.role != "system"]
    turns = [{"role": each.role, "content": each.blocks()} for each in talk]
    if not turns or turns[-1]["role"] != "user" or _is_blank(*turns[-1]["content"]):
        raise InvalidArgument("there is no request: the last message must be one of the user")
    if any(block["type"] != "text" for block in system):
        raise InvalidArgument("a system message takes text alone: give the user's the image")
    if (size := len(json.dumps([system, turns]))) > MOST_BYTES:
        raise TooLarge(
            f"the messages have {size:,} bytes, and {MOST_BYTES:,} can be sent: put what is long "
            "into files of the workspace"
        )
    return Conversation("\n\n".join(block["text"] for block in system), turns)


def _is_blank(text: Mapping[str, Any], *images: object) -> bool:
    return not (images or text["text"].strip())
