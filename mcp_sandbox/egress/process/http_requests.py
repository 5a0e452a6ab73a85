"""HTTP/1.1 as the proxy reads it: each request is checked and written again.

It serves plain HTTP and HTTP inside terminated TLS. It knows no rules and connects to nothing.
"""

import os
import re
import ssl
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import unquote_to_bytes

import anyio
import h11
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint
from anyio.streams.tls import TLSAttribute

from mcp_sandbox.egress.link import HUNG_UP
from mcp_sandbox.egress.process.mask import Header, Mask
from mcp_sandbox.egress.targets import Refusal, RefusedError, Target, parse_target
from mcp_sandbox.runtime.channel import own_tasks

Events = list[h11.Event]
BATCH = 256 * 1024
"""Bytes read at once: all TLS records received so far, passed on in one write."""
HEAD_S = 10.0
_MOST_HEAD, _MOST_TARGET = 32 * 1024, 8 * 1024
STATUS: dict[Refusal, int] = {
    "target": 400,
    "request": 400,
    "length": 414,
    "name": 421,
    "secret": 502,
    "failed": 502,
    "limit": 503,
}
"""HTTP status for each kind of refusal; 403 for the others."""

_READING = frozenset({b"GET", b"HEAD", b"OPTIONS"})
# No character or segment that a server could decode, cut or resolve to another path.
_FETCH = re.compile(rb"(?:/(?!\.\.?/)[\w.~+@-]++)*/git-upload-pack", re.ASCII)
# A server runs such a file, and gives it the rest of the path.
_SCRIPT = re.compile(rb"\.(?:php\d?|phtml|phar|f?cgi|pl|as[hmp]x?|jspx?|cfm)/", re.IGNORECASE)
_FETCH_TYPE = b"application/x-git-upload-pack-request"
# The first line of a fetch, or the empty request by which git tries a large one.
_PACKET = re.compile(rb"[\da-f]{4}(?:want |shallow |command=)|0000\Z", re.IGNORECASE)
_BEGINNING = 4096
_PATH = re.compile(rb"/[\x21\x22\x24-\x7e]*")
# Headers of a single connection, and headers that make a server use another method.
_LEFT_OUT = frozenset(
    b"host connection keep-alive proxy-connection proxy-authorization proxy-authenticate trailer"
    b" upgrade alt-svc x-http-method x-http-method-override x-method-override".split()
)


class Peer:
    """One end of an HTTP conversation: a byte stream and the state of its parser."""

    def __init__(self, stream: ByteStream, role: type[h11.CLIENT | h11.SERVER]) -> None:
        self.stream = stream
        self.http = h11.Connection(role, _MOST_HEAD)

    async def send(self, *events: h11.Event) -> None:
        await self.stream.send(b"".join(self.http.send(event) or b"" for event in events))

    async def receive(self) -> bytes:
        """Return what has been received; empty at the end."""
        try:
            pieces = [await self.stream.receive(BATCH)]
        except anyio.EndOfStream:
            return b""
        # The linter mistakes it for Django's `extra`.
        if (tls := self.stream.extra(TLSAttribute.ssl_object, None)) is not None:  # noqa: S610
            with suppress(ssl.SSLWantReadError):
                while pieces[-1] and len(pieces) * 16384 < BATCH:
                    pieces.append(tls.read(BATCH))
        return b"".join(pieces)

    async def events(self) -> list[h11.Event]:
        """Return the next event, and what has already come of the same body.

        Raises RefusedError: what has come is not HTTP/1.1, or a server's connection broke.
        """
        found = list[h11.Event]()
        try:
            while not found or isinstance(found[-1], h11.Data):
                event = self.http.next_event()
                if isinstance(event, h11.EndOfMessage):
                    # Trailers are dropped.
                    found.append(h11.EndOfMessage())
                elif isinstance(event, h11.Event):
                    found.append(event)
                elif found:
                    break
                else:
                    self.http.receive_data(await self.receive())
        except (h11.RemoteProtocolError, *HUNG_UP) as exc:
            if self.http.our_role is h11.CLIENT:
                raise RefusedError("its answer is not whole HTTP/1.1", "failed") from exc
            if isinstance(exc, h11.RemoteProtocolError):
                raise RefusedError("it is not whole HTTP/1.1", "request") from exc
            raise
        return found

    async def head(self, *, first: bool = False) -> h11.Request | None:
        """Return the next request, or None when the client hangs up instead.

        Raises RefusedError: it is not a valid request, or comes too slowly.
        """
        if not first and not self.http.trailing_data[0]:
            self.http.receive_data(await self.receive())
        try:
            with anyio.fail_after(HEAD_S):
                [event] = await self.events()
        except TimeoutError as exc:
            raise RefusedError(f"no request came within {HEAD_S:g} s", "request") from exc
        if not isinstance(event, h11.Request):
            return None
        if len(event.target) > _MOST_TARGET:
            raise RefusedError(f"its target is over {_MOST_TARGET} bytes: shorten it", "length")
        if sum(len(name) + len(value) + 4 for name, value in event.headers) > _MOST_HEAD:
            raise RefusedError(f"its headers are over {_MOST_HEAD} bytes", "request")
        return event

    async def connect(self, target: str) -> bytes:
        """Let a proxy connect to a target; return what the target has sent already."""
        asked = h11.Request(method="CONNECT", target=target, headers=[("Host", target)])
        await self.send(asked, h11.EndOfMessage())
        answer = (await self.events())[0]
        status = answer.status_code if isinstance(answer, h11.Response) else 0
        if not 200 <= status < 300:
            raise RefusedError(f"the proxy of this machine answers {status}", "failed")
        return self.http.trailing_data[0]

    async def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` when the client hangs up; return earlier if it pipelines many requests."""
        data = b"."
        while data and len(self.http.trailing_data[0]) < _MOST_HEAD:
            data = await self.receive()
            self.http.receive_data(data)
        if not data:
            ended()

    async def answer(self, status: int, kind: str, body: bytes, reason: bytes = b"") -> None:
        """Send this answer and close, unless another answer has begun."""
        if self.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        fields = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
        headers = [*fields.items()]
        await self.send(h11.Response(status_code=status, headers=headers, reason=reason))
        # The answer to HEAD has no body.
        with suppress(h11.LocalProtocolError):
            await self.send(h11.Data(body), h11.EndOfMessage())


def build_headers(
    request: h11.Request, target: Target, path: bytes, *, secure: bool, read: bool
) -> list[Header]:
    """Return the headers with which a request may go to a target and path.

    Raises RefusedError: it may not.
    """
    names, default_port = dict(request.headers), 443 if secure else 80
    if not _PATH.fullmatch(path):
        raise RefusedError("its path is not plain ASCII that begins with /", "request")
    if b"content-length" in names and b"transfer-encoding" in names:
        raise RefusedError("it has both Content-Length and Transfer-Encoding", "request")
    if b"upgrade" in names or request.method.upper() == b"CONNECT":
        # What follows one of these is not HTTP, so it could not be checked.
        raise RefusedError("upgrades to other protocols and a later CONNECT cannot pass", "request")
    if b"host" in names and parse_target(names[b"host"], default_port) != target:
        raise RefusedError("the request names another Host", "name")
    if read and not _reads(request, path):
        method = request.method[:20].decode("ascii")
        raise RefusedError(f"only reading is allowed there, not this {method}", "rule")
    host = target.host if target.port == default_port else str(target)
    return [(b"Host", host.encode()), *_passed(request)]


def _reads(request: h11.Request, path: bytes) -> bool:
    if request.method != b"POST":
        query = unquote_to_bytes(path.partition(b"?")[2])
        return request.method in _READING and b"service=git-receive-pack" not in query
    is_fetch = _FETCH.fullmatch(path) and not _SCRIPT.search(path)
    return bool(is_fetch) and _values(request, b"content-type") == [_FETCH_TYPE]


def _values(request: h11.Request, name: bytes) -> list[bytes]:
    return [value for each, value in request.headers if each == name]


async def exchange(
    client: Peer, server: Peer, begun: Events, mask: Mask | None, ended: Callable[[], None]
) -> None:
    """Send a request with the client's body, and the answer back with secrets masked.

    `ended` is called when the client hangs up. Raises RefusedError, or what its stream raises.
    """
    async with own_tasks() as tasks:
        tasks.start_soon(_upload, client, server, begun, ended)
        # The request goes first: its parser takes none after an answer, which may be there already.
        await checkpoint()
        while client.http.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            came = await server.events()
            await client.send(*(each for event in came for each in _answered(event, mask)))


async def begin(client: Peer, request: h11.Request, *, read: bool) -> Events:
    """Return a request, and the beginning of its body if a rule allows only to read.

    Raises RefusedError: the body is no fetch of git's.
    """
    if not read or request.method != b"POST":
        return [request]
    if client.http.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))
    events, data = Events([request]), b""
    while len(data) < _BEGINNING and not isinstance(events[-1], h11.EndOfMessage):
        events += await client.events()
        data = b"".join(bytes(each.data) for each in events if isinstance(each, h11.Data))
    coding = _values(request, b"content-encoding")
    if coding == [b"gzip"]:
        with suppress(zlib.error):
            data, coding = zlib.decompressobj(wbits=31).decompress(data, _BEGINNING), []
    if coding or not _PACKET.match(data):
        raise RefusedError("only reading is allowed there, and this is no fetch of git's", "rule")
    return events


async def _upload(client: Peer, server: Peer, events: Events, ended: Callable[[], None]) -> None:
    with suppress(anyio.BrokenResourceError):
        # If a server takes no more, its answer says why.
        await server.send(*events)
        while not isinstance(events[-1], h11.EndOfMessage):
            events = await client.events()
            await server.send(*events)
    await client.watch(ended)


def _answered(event: h11.Event, mask: Mask | None) -> Iterator[h11.Event]:
    if isinstance(event, h11.ConnectionClosed):
        raise RefusedError("it hung up without an answer", "failed")
    if isinstance(event, h11.InformationalResponse):
        # Other interim answers are hints, which the client does not need.
        if event.status_code == 100:
            yield h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif event.status_code == 101:
            yield event
    elif isinstance(event, h11.Response):
        codings = {value.lower() for name, value in event.headers if name == b"content-encoding"}
        if mask and (codings - {b"identity"} or event.status_code == 206):
            why = "its answer is compressed or a part, where no secret can be found"
            raise RefusedError(why, "secret")
        hidden = mask.text if mask else bytes
        name_hidden = mask.name if mask else bytes
        headers = [(name_hidden(name), hidden(value)) for name, value in _passed(event)]
        reason = hidden(event.reason)
        yield h11.Response(status_code=event.status_code, headers=headers, reason=reason)
    elif isinstance(event, h11.Data):
        yield h11.Data(mask.text(bytes(event.data), more=True)) if mask else event
    else:
        if mask:
            yield h11.Data(mask.text(b""))
        yield event


def _passed(message: h11.Request | h11.Response) -> list[Header]:
    items = message.headers.raw_items()
    # CGI servers treat `_` in a header's name as `-`.
    return [each for each in items if each[0].lower().replace(b"_", b"-") not in _LEFT_OUT]


def explain_failure(failure: Exception) -> str:
    """Return why a server cannot be used, in a clause that names no address."""
    if isinstance(failure, TimeoutError):
        return "it did not answer in time"
    if isinstance(failure, ssl.SSLError):
        return f"its TLS cannot be trusted: {getattr(failure, 'verify_message', failure.reason)}"
    number = getattr(failure.__cause__ or failure, "errno", None)
    return f"it cannot be reached: {os.strerror(number) if number else 'it hung up'}"
