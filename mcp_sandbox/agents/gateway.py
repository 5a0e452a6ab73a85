"""The way of one run to its model. The program inside knows a token; the key is put in here.

Which requests may leave, and what the answers say they cost, is decided by pure functions.

A request is read completely, checked and written anew; an answer is passed on as it arrives.
"""

import hashlib
import logging
import re
import secrets
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import anyio
import h11
import httpx2
from anyio import to_thread
from anyio.abc import ByteStream
from pydantic_core import from_json, to_json

from mcp_sandbox.agents.connectors import Connector
from mcp_sandbox.config import EgressConfig, RunConfig
from mcp_sandbox.egress.authority import load_trusted
from mcp_sandbox.egress.http_requests import HUNG_UP, Peer
from mcp_sandbox.egress.secrets import Mask
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.channel import own_tasks
from mcp_sandbox.telemetry.logs import event

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
logger = logging.getLogger(__name__)

_MOST_AT_ONCE, _SHOWN_BYTES = 8, 2000
# Limits: for a request's head, and its body; to connect to the service; for its next bytes.
_REQUEST_S, _DIAL_S, _SILENT_S = 60.0, 30.0, 600.0
_LET_THROUGH = {
    "anthropic": ("POST /v1/messages", "POST /v1/messages/count_tokens", "GET /v1/models"),
    "openai": ("POST /v1/chat/completions", "POST /v1/responses", "GET /v1/models"),
}
_GOING = (
    *(b"accept", b"user-agent", b"x-app"),
    *(b"anthropic-version", b"anthropic-beta", b"openai-beta"),
)
_OURS = {b"anthropic-version": b"2023-06-01"}
_COMING = ("content-type", "retry-after", "request-id")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


class Refusal(Exception):
    """A request is not passed on; the message says why to the program that made it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_request(raw: bytes | bytearray, connector: Connector, chat: ChatId) -> bytes:
    """Return the body of a request written anew, so that the service reads what was judged.

    Raises Refusal: it is no JSON object, asks for another model, or for what needs a network.
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
        if any(map(_is_to_be_fetched, _blocks(asked.get(name)))):
            yield f"a place elsewhere in {name!r}"


def _blocks(content: object) -> Iterator[dict[str, Any]]:
    """Yield the content's blocks, and those within, but not the arguments of tools."""
    parts: list[Any] = [*content] if isinstance(content, list) else [content]
    for block in filter(None, map(_object, parts)):
        yield block
        for name in ("content", "output", "source", "tools"):
            yield from _blocks(block.get(name))


def _is_to_be_fetched(block: dict[str, Any]) -> bool:
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
    cached_tokens: int = 0
    output_tokens: int = 0


class UsageReader:
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
        if name == b"cache_read_input_tokens":
            self._counts.cached_tokens += more


@asynccontextmanager
async def open_gateway(
    connector: Connector,
    *,
    chat: ChatId,
    limits: RunConfig,
    egress: EgressConfig | None = None,
    silent_s: float = _SILENT_S,
) -> AsyncGenerator["Gateway"]:
    """Open a proxy from a run to a model service while the block lasts.

    `egress` says how this machine reaches the network. A service that sends nothing for `silent_s`
    seconds is given up, and so is a client that takes longer for a request.

    Raises OperatorError: the key cannot be read, or `egress` cannot be used.
    """
    await connector.key()
    # In a thread: it reads certificates, and the library imports more of itself.
    client = await to_thread.run_sync(
        _client, connector.settings.url, egress or EgressConfig(), silent_s
    )
    async with client:
        gateway = Gateway(connector, client, chat, limits, min(_REQUEST_S, silent_s))
        try:
            yield gateway
        finally:
            gateway.ended = True
            event(logger, "model", chat=str(chat), to=connector.name, **asdict(gateway.counts))


def _client(url: str, egress: EgressConfig, silent_s: float) -> httpx2.AsyncClient:
    outside: dict[str, Any] = {"verify": False}
    if url.startswith("https:"):  # Else the service is on this machine.
        certificates = load_trusted(egress.ca_bundle).decode("ascii")
        outside["verify"] = ssl.create_default_context(cadata=certificates)
        outside["proxy"] = egress.upstream_proxy or None
    timeout = httpx2.Timeout(silent_s, connect=_DIAL_S, pool=None)
    return httpx2.AsyncClient(timeout=timeout, trust_env=False, **outside)


class Gateway:
    """The proxy of one run. Inside, `token` replaces the key; it is valid only here."""

    def __init__(
        self,
        connector: Connector,
        client: httpx2.AsyncClient,
        chat: ChatId,
        limits: RunConfig,
        request_s: float,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.counts, self.ended = Counts(), False
        self._connector, self._client = connector, client
        self._chat, self._limits, self._request_s = chat, limits, request_s
        self._places = anyio.CapacityLimiter(_MOST_AT_ONCE)

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection from the sandbox until either side closes it."""
        client = Peer(stream, h11.SERVER)
        with suppress(*HUNG_UP):
            try:
                while await self._serve_next(client):
                    client.http.start_next_cycle()
            except (Refusal, RefusedError) as exc:
                # If an answer has begun, the client sees that it is incomplete.
                status = exc.status if isinstance(exc, Refusal) else 400
                await client.answer(status, "application/json", _refused(status, exc))

    async def ask(
        self, what: str, body: bytes, take: Callable[[bytes], Awaitable[None]]
    ) -> tuple[int, str]:
        """Ask for this process, with the same checks and limits; return status and error.

        `what` is METHOD PATH, and `take` gets the answer's bytes.
        """
        status, error = 0, b""
        try:
            async with aclosing(self._answer(what, _OURS, body)) as events:
                async for event in events:
                    if isinstance(event, h11.Response):
                        status = event.status_code
                    elif isinstance(event, h11.Data) and status == 200:
                        await take(event.data)
                    elif isinstance(event, h11.Data):
                        error = (error + event.data)[:_SHOWN_BYTES]
        except Refusal as exc:
            return status or exc.status, str(exc)
        return status, error.decode("utf-8", "replace")

    async def _serve_next(self, client: Peer) -> bool:
        """Answer a request; return whether another may follow. Raises Refusal, RefusedError."""
        with anyio.move_on_after(self._request_s) as limit:
            request = await client.head()
        if limit.cancelled_caught or not request:
            return False
        if (request.method, request.target) == (b"HEAD", b"/"):
            # Programs check in this way whether there is a service.
            await client.answer(200, "text/plain", b"")
            return False
        headers = dict(request.headers)
        what = self._admitted(request, headers)
        async with self._places:
            body = await self._read_body(client, headers)
            async with own_tasks() as tasks:
                tasks.start_soon(client.watch, tasks.cancel_scope.cancel)
                async with aclosing(self._answer(what, headers, body)) as events:
                    async for event in events:
                        await client.send(event)
        return set(client.http.states.values()) == {h11.DONE}

    def _admitted(self, request: h11.Request, headers: Mapping[bytes, bytes]) -> str:
        """Return METHOD TARGET of a request, if it is allowed. Raises Refusal."""
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise Refusal(400, "the body has two lengths")
        what = f"{request.method.decode('ascii')} {request.target.decode('ascii')}"
        asked = what.partition("?")[0]
        bearer = headers.get(b"authorization", b"")[len(b"Bearer ") :]
        given = headers.get(b"x-api-key") or bearer
        if self.ended or not secrets.compare_digest(given, self.token.encode()):
            raise Refusal(401, "this is not the token of this run")
        if asked not in (known := _LET_THROUGH[self._connector.settings.protocol]):
            raise Refusal(404, f"only these can be asked: {', '.join(known)}")
        return what

    async def _read_body(self, client: Peer, headers: Mapping[bytes, bytes]) -> bytearray:
        body, announced = bytearray(), int(headers.get(b"content-length", 0))
        try:
            with anyio.fail_after(self._request_s):
                while client.http.their_state is h11.SEND_BODY:
                    if max(announced, len(body)) > MOST_BODY:
                        raise Refusal(413, f"the body has more than {MOST_BODY:,} bytes")
                    for event in await client.events():
                        body += event.data if isinstance(event, h11.Data) else b""
        except TimeoutError as exc:
            raise Refusal(408, f"the body did not come within {self._request_s:g} s") from exc
        return body

    async def _answer(
        self, what: str, headers: Mapping[bytes, bytes], body: bytes | bytearray
    ) -> AsyncGenerator[h11.Response | h11.Data | h11.EndOfMessage]:
        """Send a request to the service, if it is allowed, and yield the answer as it arrives.

        Raises Refusal: it is not allowed, or the service failed, maybe in the middle of its answer.
        """
        name, (method, _, target) = self._connector.name, what.partition(" ")
        asked = check_request(body, self._connector, self._chat) if method == "POST" else b""
        try:
            key = await self._connector.key()
        except OperatorError as exc:
            logger.warning("%s", exc)
            raise Refusal(403, "the key cannot be read; the operator must correct it") from exc
        self._count_request(len(asked))
        place, mask = self._connector.address(target), Mask([key])
        going, usage, whole = self._headers(headers, key), UsageReader(self.counts), False
        try:
            async with self._client.stream(method, place, headers=going, content=asked) as response:
                yield self._head(response, mask)
                async for piece in response.aiter_bytes():
                    usage.feed(piece)
                    yield h11.Data(mask.text(piece, more=True))
                whole = True
                yield h11.Data(mask.text(b""))
                yield h11.EndOfMessage()
        except httpx2.RequestError as exc:
            why = f"the model service of connector {name} failed: {type(exc).__name__}"
            logger.warning("%s", why)
            late = isinstance(exc, httpx2.TimeoutException)
            raise Refusal(504 if late else 502, why) from exc
        finally:
            if not whole:
                usage.cut()

    def _head(self, response: httpx2.Response, mask: Mask) -> h11.Response:
        """Return the head that is passed on. Raises Refusal: it is a redirect."""
        if response.is_redirect:
            what = f"the service leads elsewhere: correct connectors.{self._connector.name}.url"
            raise Refusal(response.status_code, what)
        headers = [
            (name.encode(), mask.text(value.encode()))
            for name, value in response.headers.items()
            if name in _COMING or name.startswith("anthropic-")
        ]
        return h11.Response(status_code=response.status_code, headers=headers)

    def _count_request(self, size: int) -> None:
        for name in ("requests", "output_tokens"):
            if getattr(self.counts, name) >= (most := getattr(self._limits, f"max_{name}")):
                raise Refusal(403, f"this run has used all of agents.run.max_{name}, {most:,}")
        self.counts.requests += 1
        self.counts.sent += size

    def _headers(self, given: Mapping[bytes, bytes], key: bytes) -> dict[bytes, bytes]:
        going = {name: given[name] for name in _GOING if name in given and given[name].isascii()}
        form = {b"content-type": b"application/json", b"accept-encoding": b"identity"}
        return {**going, **self._connector.header(key), **form}


def _refused(status: int, why: Exception) -> bytes:
    """Return an error's body in the form of both protocols."""
    kind = _KINDS.get(status, "api_error")
    error = {"type": kind, "message": f"mcp-sandbox: {why}", "param": None, "code": None}
    return to_json({"type": "error", "error": error})
