"""No program and no sandbox: one call of the model service, told as it comes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from mcp_sandbox.agents import events as event_types
from mcp_sandbox.agents.executors.base import Program, Run
from mcp_sandbox.agents.messages import PromptInput

_WHOLE = ("end_turn", "stop_sequence", "stop")


class Direct(PromptInput):
    """Asks the model once. The argv of its Program is a method and path, its stdin the body."""

    name: ClassVar[str] = "direct"
    image: ClassVar[str] = ""
    protocols: ClassVar[Sequence[str]] = ("anthropic", "openai")
    prepare: ClassVar[str] = ""

    model: str | None = None
    # The Messages API has no default of its own.
    max_tokens: int = Field(default=8192, ge=1)

    def command(self, run: Run) -> Program:
        system, model = run.conversation.system, self.model or run.way.model
        openai, limit = run.way.protocol == "openai", self.max_tokens
        turns = [
            {**turn, "content": [*_blocks(turn["content"], openai=openai)]}
            for turn in run.conversation.turns
        ]
        body: dict[str, Any] = {"model": model, "stream": True, "messages": turns}
        if not openai:
            body |= {"max_tokens": limit} | ({"system": system} if system else {})
        elif system:
            body["messages"] = [{"role": "system", "content": system}, *turns]
        path = "/v1/chat/completions" if openai else "/v1/messages"
        return Program(["POST", path], {}, json.dumps(body).encode(), {})

    def events(self, line: bytes) -> Iterable[event_types.Event]:
        kind, _, data = line.partition(b":")
        if kind != b"data" or data.strip() == b"[DONE]":
            return ()
        return event_types.parse_line(data, _events)


def _blocks(content: Sequence[Mapping[str, Any]], *, openai: bool) -> Iterator[Mapping[str, Any]]:
    for block in content:
        if openai and block["type"] == "image":
            source = block["source"]
            url = f"data:{source['media_type']};base64,{source['data']}"
            yield {"type": "image_url", "image_url": {"url": url}}
        # Services refuse an empty one.
        elif block.get("text") != "":
            yield block


def _events(message: Any) -> Iterator[event_types.Event]:  # noqa: ANN401 - JSON of a stranger
    match message:
        case {"error": {"message": why}}:
            yield event_types.Completion("", is_error=True, reason=f"api_error: {why}", turns=1)
        case {"type": "content_block_delta", "delta": {"text": text}}:
            yield event_types.Text(text, partial=True)
        case {"type": "message_delta", "delta": {"stop_reason": word}}:
            yield _end(word)
        case {"choices": [{"delta": delta, **choice}, *_]}:
            if text := delta.get("content"):
                yield event_types.Text(text, partial=True)
            if word := choice.get("finish_reason"):
                yield _end(word)
        case {"type": _} | {"choices": []}:
            pass
        case _:
            raise ValueError("of an unknown type")


def _end(word: object) -> event_types.Completion:
    """Take what was said before as its content."""
    why = "" if word in _WHOLE else f"{word}: the model ended its answer early"
    return event_types.Completion("", is_error=bool(why), reason=why, turns=1)
