"""Requests to a model as they may leave, and what its answers say they cost. Pure."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import from_json, to_json

from mcp_sandbox.agents.connectors import Connector
from mcp_sandbox.models import ChatId

MOST_BODY = 32 << 20
# While a body is read all other chats wait; texts in it take no time, unlike numbers and lists.
_MOST_QUOTES, _MOST_BESIDE = 200_000, 1 << 20
# Tools that the program inside runs itself, and content that is in the request itself.
_OWN_TOOLS = (None, "custom", "function", "local_shell", "namespace")
_OWN_SOURCES = ("base64", "text", "content")
# Within a text the quotes are escaped: what a model writes of such figures is not taken for them.
_USED = re.compile(
    rb'"((?:cache_creation_|cache_read_)?input_tokens|prompt_tokens|output_tokens'
    rb'|completion_tokens)" ?: ?(\d{1,9})'
)
_LONGEST_USED = 64
_SAME = {b"prompt_tokens": b"input_tokens", b"completion_tokens": b"output_tokens"}
# What makes a service reach other servers, or answer elsewhere than here.
_REACHING = ("mcp_servers", "container", "web_search_options", "plugins", "prompt", "background")


class Refusal(Exception):
    """A request is not passed on; the message says why to the program that made it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def judged(raw: bytes | bytearray, connector: Connector, chat: ChatId) -> bytes:
    """Return the body of a request written anew, so that the service reads what was judged.

    Raises:
        Refusal: it is no JSON object, asks for another model, or for what needs a network.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > _MOST_QUOTES or sum(map(len, plain.split(b'"')[::2])) > _MOST_BESIDE:
        raise Refusal(413, "the body has too many parts, or too much beside its texts")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise Refusal(400, f"the body is no JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    asked = cast("dict[str, Any]", body)
    if connector.models and asked.get("model") not in connector.models:
        known = ", ".join(connector.models)
        setting = f"connectors.{connector.name}.models"
        raise Refusal(400, f"this model may not be asked; {setting} has {known}")
    if not connector.settings.server_tools and (what := next(_reaching(asked), "")):
        setting = f"connectors.{connector.name}.server_tools"
        raise Refusal(400, f"{what}: the service would reach a network, and {setting} is false")
    if "user_id" in (metadata := _object(asked.get("metadata"))):
        person = hashlib.sha256(f"{chat.user}\0{chat.chat}".encode()).hexdigest()[:32]
        asked["metadata"] = {**metadata, "user_id": person}
    if connector.settings.protocol == "openai" and "messages" in asked and asked.get("stream"):
        # Else such a stream does not tell what it cost.
        asked["stream_options"] = {"include_usage": True}
    return to_json(asked)


def _reaching(asked: dict[str, Any]) -> Iterator[str]:
    """Name what a request has the service do on other servers than its own."""
    yield from (repr(name) for name in _REACHING if asked.get(name))
    for tool in _blocks(asked.get("tools")):
        if (kind := tool.get("type")) not in _OWN_TOOLS:
            yield f"a tool of type {str(kind)[:80]!r}"
    for name in ("system", "messages", "input", "instructions"):
        if any(map(_is_elsewhere, _blocks(asked.get(name)))):
            yield f"a place elsewhere in {name!r}"


def _blocks(content: object) -> Iterator[dict[str, Any]]:
    """Yield the content's blocks, and those within, but not the arguments of tools."""
    parts: list[Any] = [*content] if isinstance(content, list) else [content]
    for block in filter(None, map(_object, parts)):
        yield block
        for name in ("content", "output", "source", "tools"):
            yield from _blocks(block.get(name))


def _is_elsewhere(block: dict[str, Any]) -> bool:
    """Return whether a block is not in the request, but to be fetched."""
    source = _object(block.get("source"))
    if source and source.get("type") not in _OWN_SOURCES:
        return True
    places = [place for name, place in block.items() if name.endswith("_url") and place]
    plain = [_object(place).get("url", place) for place in places]
    return not all(isinstance(place, str) and place.startswith("data:") for place in plain)


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@dataclass
class Counts:
    """What a run has asked of its model by now; bytes are those of bodies."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class Usage:
    """Finds in one answer, as its bytes pass, what it used, and adds it to the counts.

    Of a stream that breaks off no sum may have come: each of its events is taken for a token.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts, self._tail, self._events = counts, b"", 0
        self._most = Counter[bytes]()

    def feed(self, data: bytes) -> None:
        """Take the next bytes; the figures in them are sums since the answer began."""
        self._counts.received += len(data)
        self._events += data.count(b"data:")
        data = self._tail + data
        # The search stops at each quote, of which a text in JSON has many.
        for found in _USED.finditer(data) if b"_tokens" in data else ():
            self._raise_to(_SAME.get(found[1], found[1]), int(found[2]))
        self._tail = data[-_LONGEST_USED:]

    def cut(self) -> None:
        """Take note that the answer broke off."""
        self._raise_to(b"output_tokens", self._events)

    def _raise_to(self, name: bytes, tokens: int) -> None:
        more = max(0, tokens - self._most[name])
        self._most[name] += more
        if name == b"output_tokens":
            self._counts.output_tokens += more
        else:
            self._counts.input_tokens += more
