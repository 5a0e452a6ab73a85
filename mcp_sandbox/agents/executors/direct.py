"""No program and no sandbox: one call of the model service, told as it comes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio
from pydantic import Field
from starlette.types import Message

from mcp_sandbox.agents import events as told
from mcp_sandbox.agents.executor import Program, Run, Take
from mcp_sandbox.agents.gateway import Gateway
from mcp_sandbox.agents.messages import Given

# The Messages API has no default of its own for the tokens of an answer.
_MOST_TOKENS = 8192
_WHOLE = ("end_turn", "stop_sequence", "stop")
_MOST_ERROR = 2000


class _Arguments(Given):
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class Direct:
    """Asks the model once. The argv of its Program is the method and path, its stdin the body."""

    name = "direct"
    image = ""
    protocols: Sequence[str] = ("anthropic", "openai")
    prepare = ""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._given = _Arguments.read(arguments, "the arguments of direct")
        self._said: list[str] = []

    def command(self, run: Run) -> Program:
        talk, model = run.conversation, self._given.model or run.way.model
        body: dict[str, Any] = {"model": model, "stream": True}
        turns = [{**each, "content": [*filter(_is_said, each["content"])]} for each in talk.turns]
        if run.way.protocol == "openai":
            path, limit = "/v1/chat/completions", self._given.max_tokens
            turns = [{**each, "content": [*map(_as_openai, each["content"])]} for each in turns]
            turns = [{"role": "system", "content": talk.system}, *turns] if talk.system else turns
        else:
            path, limit = "/v1/messages", self._given.max_tokens or _MOST_TOKENS
            body |= {"system": talk.system} if talk.system else {}
        body |= {"messages": turns} | ({"max_tokens": limit} if limit else {})
        return Program(["POST", path], {}, json.dumps(body).encode(), {})

    def events(self, line: bytes) -> Iterable[told.Event]:
        kind, _, data = line.partition(b":")
        if kind != b"data" or data.strip() == b"[DONE]":
            return ()
        return told.understood(data, self._events)

    def _events(self, said: Any) -> Iterator[told.Event]:  # noqa: ANN401 - JSON of a stranger
        match said:
            case {"error": {"message": why}}:
                yield self._completion(f"api_error: {why}")
            case {"type": "content_block_delta", "delta": {"text": text}}:
                yield self._text(text)
            case {"type": "message_delta", "delta": {"stop_reason": word}}:
                yield self._completion(_why(word))
            case {"choices": [{"delta": delta, **choice}, *_]}:
                if text := delta.get("content"):
                    yield self._text(text)
                if word := choice.get("finish_reason"):
                    yield self._completion(_why(word))
            case {"type": _} | {"choices": []}:
                pass
            case _:
                raise ValueError("of an unknown type")

    def _text(self, text: str) -> told.Text:
        event = told.Text(text, partial=True)
        self._said.append(text)
        return event

    def _completion(self, reason: str) -> told.Completion:
        return told.Completion("".join(self._said), bool(reason), reason, turns=1)


def _is_said(block: Mapping[str, Any]) -> bool:
    """Whether it is more than an empty text, which services refuse."""
    return block.get("text") != ""


def _as_openai(block: Mapping[str, Any]) -> Mapping[str, Any]:
    if block["type"] == "text":
        return block
    source = block["source"]
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _why(word: object) -> str:
    """Why an answer that ended with this word is not whole, if so."""
    return "" if word in _WHOLE else f"{word}: the model ended its answer early"


async def ask(gateway: Gateway, what: str, body: bytes, take: Take) -> tuple[int, str]:
    """Ask as a program inside would, by the run's token: judged, counted and bounded likewise."""
    method, path = what.split()
    headers = {"x-api-key": gateway.token, "anthropic-version": "2023-06-01"}
    request: dict[str, Any] = {"type": "http", "method": method, "raw_path": path.encode()}
    request["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    said: list[Message] = [{"type": "http.request", "body": body}]
    status, error = 0, b""

    async def receive() -> Message:
        if not said:
            await anyio.sleep_forever()
        return said.pop()

    async def send(message: Message) -> None:
        nonlocal status, error
        status, data = message.get("status", status), message.get("body", b"")
        if status == 200:
            await take(data)
        else:
            error = (error + data)[:_MOST_ERROR]

    await gateway.answer({**request, "query_string": b""}, receive, send)
    return status, error.decode("utf-8", "replace")
