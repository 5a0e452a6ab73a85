"""The way of one run to its model. The program inside knows a token; the key is put in here.

Which requests may leave, and what the answers say they cost, is decided by pure functions.

A request is read completely, checked and written anew; an answer is passed on as it arrives.
"""

import hashlib
import json
import logging
import re
import secrets
import select
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSStream

from mcp_sandbox.egress.link import HUNG_UP
from mcp_sandbox.egress.process.http_requests import Peer, explain_failure
from mcp_sandbox.egress.process.keeper import Ask
from mcp_sandbox.egress.process.mask import Mask
from mcp_sandbox.egress.process.proxy import Proxy
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import TooLarge
from mcp_sandbox.json_size import check_json_size
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.channel import own_tasks

MOST_BODY = 32 << 20
# Schemas of tools have many values, and no validator collects what is wrong with each.
_MOST_VALUES = 100_000
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

_MOST_AT_ONCE = 8
# To connect to the service.
_DIAL_S = 30.0
_LET_THROUGH = {
    "anthropic": ("POST /v1/messages", "POST /v1/messages/count_tokens", "GET /v1/models"),
    "openai": ("POST /v1/chat/completions", "POST /v1/responses", "GET /v1/models"),
}
_GOING = (
    *(b"accept", b"user-agent", b"x-app"),
    *(b"anthropic-version", b"anthropic-beta", b"openai-beta"),
)
_COMING = ("content-type", "retry-after", "request-id")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
Answer = h11.Response | h11.Data | h11.EndOfMessage
Told = Callable[["Counts"], object]


class Refusal(Exception):
    """A request is not passed on; the message says why to the program that made it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Service:
    """A model service, and what one run may ask of it; `token` replaces the key inside.

    `header` is that of the key. `models` are those that may be asked, or none for any. A service
    that sends nothing for `silent_s` seconds is given up, and so is a client that takes over
    `request_s` for a request.
    """

    name: str
    token: str
    url: str
    protocol: str
    header: str
    models: Sequence[str]
    server_tools: bool
    max_requests: int
    max_output_tokens: int
    silent_s: float
    request_s: float

    def address(self, path: str) -> str:
        """Return the URL of a request for a path that begins with /v1."""
        # Services of one protocol have the version in their `url`.
        return self.url + path.removeprefix("/v1" if self.protocol == "openai" else "")


def check_request(raw: bytes | bytearray, service: Service, chat: ChatId) -> bytes:
    """Return the body of a request written anew, so that the service reads what was judged.

    Raises Refusal: it is no JSON object, asks for another model, or for what needs a network.
    """
    try:
        check_json_size(raw, _MOST_VALUES)
        body = json.loads(raw, parse_constant=_refuse_constant)
    except TooLarge as exc:
        raise Refusal(413, str(exc)) from exc
    except ValueError as exc:
        raise Refusal(400, f"the body is no JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal(400, "the body is no JSON object")
    asked = cast("dict[str, Any]", body)
    if service.models and asked.get("model") not in service.models:
        known = ", ".join(service.models)
        setting = f"connectors.{service.name}.models"
        raise Refusal(400, f"this model may not be asked; {setting} has {known}")
    if not service.server_tools and (what := next(_reaching(asked), "")):
        setting = f"connectors.{service.name}.server_tools"
        raise Refusal(400, f"{what}: the service would reach a network, and {setting} is false")
    if "user_id" in (metadata := _object(asked.get("metadata"))):
        person = hashlib.sha256(f"{chat.user}\0{chat.chat}".encode()).hexdigest()[:32]
        asked["metadata"] = {**metadata, "user_id": person}
    if service.protocol == "openai" and "messages" in asked and asked.get("stream"):
        # Else such a stream does not tell what it cost.
        asked["stream_options"] = {"include_usage": True}
    try:
        return _write(asked)
    except ValueError as exc:
        raise Refusal(400, "the body has a number or a character that is none") from exc


def _write(value: object) -> bytes:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value")


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

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; the figures in them are sums so far. Return if one has grown."""
        before = self._most.total()
        self._counts.received += len(data)
        self._events += data.count(b"data:")
        data = self._tail + data
        # The search stops at each quote, of which a text in JSON has many.
        for found in _USED.finditer(data) if b"_tokens" in data else ():
            self._raise_to(_SAME.get(found[1], found[1]), int(found[2]))
        self._tail = data[-_LONGEST_USED:]
        return self._most.total() > before

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


class Gateway:
    """The proxy of one run to its model service; `told` is called when the counts have changed."""

    def __init__(self, service: Service, chat: ChatId, ask: Ask, proxy: Proxy, told: Told) -> None:
        self.counts = Counts()
        self._service, self._chat, self._ask = service, chat, ask
        self._proxy, self._told = proxy, told
        self._places = anyio.CapacityLimiter(_MOST_AT_ONCE)
        self._kept = list[Peer]()  # Connections to the service on which nothing is under way.

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection from the sandbox until either side closes it."""
        client = Peer(stream, h11.SERVER)
        with suppress(*HUNG_UP):
            try:
                while await self._serve_next(client):
                    client.http.start_next_cycle()
            except (Refusal, RefusedError, RecursionError) as exc:
                # If an answer has begun, the client sees that it is incomplete.
                status = exc.status if isinstance(exc, Refusal) else 400
                await client.answer(status, "application/json", _refused(status, exc))

    async def _serve_next(self, client: Peer) -> bool:
        """Answer a request; return whether another may follow. Raises Refusal, RefusedError."""
        with anyio.move_on_after(self._service.request_s) as limit:
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
        if not secrets.compare_digest(given, self._service.token.encode()):
            raise Refusal(401, "this is not the token of this run")
        if asked not in (known := _LET_THROUGH[self._service.protocol]):
            raise Refusal(404, f"only these can be asked: {', '.join(known)}")
        return what

    async def _read_body(self, client: Peer, headers: Mapping[bytes, bytes]) -> bytearray:
        body, announced = bytearray(), int(headers.get(b"content-length", 0))
        try:
            with anyio.fail_after(self._service.request_s):
                while client.http.their_state is h11.SEND_BODY:
                    if max(announced, len(body)) > MOST_BODY:
                        raise Refusal(413, f"the body has more than {MOST_BODY:,} bytes")
                    for event in await client.events():
                        body += event.data if isinstance(event, h11.Data) else b""
        except TimeoutError as exc:
            raise Refusal(
                408, f"the body did not come within {self._service.request_s:g} s"
            ) from exc
        return body

    async def _answer(
        self, what: str, headers: Mapping[bytes, bytes], body: bytes | bytearray
    ) -> AsyncGenerator[Answer]:
        """Send a request to the service, if it is allowed, and yield the answer as it arrives.

        Raises Refusal: it is not allowed, or the service failed, maybe in the middle of its answer.
        """
        service = self._service
        asked = check_request(body, service, self._chat) if what.startswith("POST ") else b""
        answer = await self._ask("key")
        if "refused" in answer:
            raise Refusal(403, answer["refused"])
        key = str(answer["key"]).encode("ascii")
        self._count_request(len(asked))
        self._told(self.counts)
        request = self._request(what, headers, key, asked)
        mask, usage, whole = Mask([key]), UsageReader(self.counts), False
        try:
            async with aclosing(self._exchange(request, asked)) as events:
                async for event in events:
                    if isinstance(event, h11.Data) and usage.feed(bytes(event.data)):
                        # Else it would be lost if this process ended now.
                        self._told(self.counts)
                    if isinstance(event, h11.EndOfMessage):
                        whole = True
                        # The program can end as soon as it has all.
                        self._told(self.counts)
                        yield h11.Data(mask.text(b""))
                    yield self._passed(event, mask)
        except (*HUNG_UP, RefusedError) as exc:
            clause = str(exc) if isinstance(exc, RefusedError) else explain_failure(exc)
            why = f"the model service of connector {service.name} failed: {clause}"
            logger.warning("%s", why)
            raise Refusal(504 if isinstance(exc, TimeoutError) else 502, why) from exc
        finally:
            if not whole:
                usage.cut()
                self._told(self.counts)

    async def _exchange(self, request: h11.Request, body: bytes) -> AsyncGenerator[Answer]:
        """Yield what the service answers; it may be silent for `silent_s`. Raises HUNG_UP."""
        async with self._reached() as server:
            with anyio.fail_after(self._service.silent_s):
                await server.send(request, h11.Data(body), h11.EndOfMessage())
            event: h11.Event | None = None
            while not isinstance(event, h11.EndOfMessage):
                with anyio.fail_after(self._service.silent_s):
                    events = await server.events()
                for event in events:
                    if isinstance(event, h11.Response | h11.Data):
                        yield event
                    elif isinstance(event, h11.ConnectionClosed):
                        raise anyio.EndOfStream
            # What came behind the answer is none of the next request.
            if {*server.http.states.values()} == {h11.DONE} and not server.http.trailing_data[0]:
                server.http.start_next_cycle()
                self._kept.append(server)
        yield h11.EndOfMessage()

    def _passed(self, event: Answer, mask: Mask) -> Answer:
        """Return what is passed on of an event of the service. Raises Refusal: it cannot be."""
        if isinstance(event, h11.Data):
            return h11.Data(mask.text(bytes(event.data), more=True))
        if isinstance(event, h11.EndOfMessage):
            return event
        headers = dict(event.headers)
        if event.status_code in range(300, 400) and b"location" in headers:
            what = f"the service leads elsewhere: correct connectors.{self._service.name}.url"
            raise Refusal(event.status_code, what)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refusal(502, "the service compresses its answer, which it was asked not to do")
        kept = [
            (mask.name(name), mask.text(value))
            for name, value in headers.items()
            if name.decode("ascii") in _COMING or name.startswith(b"anthropic-")
        ]
        return h11.Response(status_code=event.status_code, headers=kept)

    def _count_request(self, size: int) -> None:
        for name in ("requests", "output_tokens"):
            if getattr(self.counts, name) >= (most := getattr(self._service, f"max_{name}")):
                raise Refusal(403, f"this run has used all of agents.run.max_{name}, {most:,}")
        self.counts.requests += 1
        self.counts.sent += size

    def _request(
        self, what: str, given: Mapping[bytes, bytes], key: bytes, asked: bytes
    ) -> h11.Request:
        method, _, target = what.partition(" ")
        url = urlsplit(self._service.address(target))
        path = f"{url.path}?{url.query}" if url.query else url.path
        going = {name: given[name] for name in _GOING if name in given and given[name].isascii()}
        form = {b"content-type": b"application/json", b"accept-encoding": b"identity"}
        size = {b"content-length": b"%d" % len(asked)} if asked else {}
        name = self._service.header.encode("ascii")
        credentials = {name: key if name == b"x-api-key" else b"Bearer " + key}
        headers = {b"host": url.netloc.encode("ascii"), **going, **credentials, **form, **size}
        return h11.Request(method=method, target=path, headers=[*headers.items()])

    @asynccontextmanager
    async def _reached(self) -> AsyncGenerator[Peer]:
        """Connect to the service, or use a connection again that is still open."""
        while self._kept:
            server = self._kept.pop()
            line = server.stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - no Django
            poll = select.poll()
            poll.register(line, select.POLLIN)
            if not poll.poll(0):
                break
            await server.stream.aclose()
        else:
            with anyio.fail_after(_DIAL_S):
                server = await self._dial()
        try:
            yield server
        finally:
            if server not in self._kept:
                await anyio.aclose_forcefully(server.stream)

    async def _dial(self) -> Peer:
        url, proxy = urlsplit(self._service.url), urlsplit(self._proxy.upstream)
        host, is_tls = url.hostname or "", url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        # Without TLS the service is on this machine.
        if not (is_tls and proxy.hostname and proxy.port):
            stream: ByteStream = await anyio.connect_tcp(host, port)
        else:
            stream = await anyio.connect_tcp(proxy.hostname, proxy.port)
            await Peer(stream, h11.CLIENT).connect(f"{host}:{port}")
        if is_tls:
            stream = await TLSStream.wrap(stream, hostname=host, ssl_context=self._proxy.outside)
        return Peer(stream, h11.CLIENT)

    async def close_at_end(self) -> None:
        """Close the connections to the service when this is cancelled."""
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for each in self._kept:
                    await anyio.aclose_forcefully(each.stream)


def _refused(status: int, why: Exception) -> bytes:
    """Return an error's body in the form of both protocols."""
    kind = _KINDS.get(status, "api_error")
    error = {"type": kind, "message": f"mcp-sandbox: {why}", "param": None, "code": None}
    return _write({"type": "error", "error": error})
