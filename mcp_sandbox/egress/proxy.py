"""The proxy that programs inside speak to: CONNECT and HTTP/1.1 with whole URLs, nothing else.

One connection: its head, the rule, the name, the address, a dial, and bytes both ways. What any of
them throws ends that connection alone.
"""

import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from mcp_sandbox.egress.addresses import addresses_of
from mcp_sandbox.egress.authority import Authority
from mcp_sandbox.egress.hello import named_host
from mcp_sandbox.egress.opened import (
    BATCH,
    HEAD_S,
    LAST_S,
    Peer,
    exchange,
    outgoing,
    path_of,
    searchable,
)
from mcp_sandbox.egress.rules import Rule, Rules
from mcp_sandbox.egress.secrets import Secrets
from mcp_sandbox.egress.targets import RefusedError, Target, split_url, target_of
from mcp_sandbox.models import ChatId

logger = logging.getLogger(__name__)

_MOST = 1024
_DIAL_S, _IDLE_S = 10.0, 15 * 60.0
# How long a tunnel of which one side has ended may be silent.
_ENDING_S = 15.0
_MOST_ADDRESSES = 4
_TLS = b"\x16"
_HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

Note = Callable[[Target | None, Rule | RefusedError, int, int, float], None]
"""Told once a connection that a rule let pass, and once a refusal: bytes out and in, ms."""


@dataclass(frozen=True)
class Way:
    """Whose connections these are, and what they may."""

    chat: ChatId
    grants: Callable[[], Sequence[Rule]]
    note: Note


class Proxy:
    """One for all sandboxes of a server; `upstream` is http://HOST:PORT or empty."""

    def __init__(
        self, rules: Rules, authority: Authority, secrets: Secrets, *, upstream: str = ""
    ) -> None:
        url = urlsplit(upstream)
        self.upstream = (url.hostname, url.port) if url.hostname and url.port else None
        self.rules = rules
        self.authority = authority
        self.secrets = secrets
        self._connections = 0

    async def serve(self, stream: ByteStream, way: Way) -> None:
        """Serve one connection until it is to be closed, whatever comes."""
        self._connections += 1
        try:
            await _Connection(self, stream, way).run(full=self._connections > _MOST)
        except* _HUNG_UP:
            pass
        except* Exception as group:  # noqa: BLE001 - one connection must not end the others
            # Without its words, which may be a client's or a server's.
            names = ", ".join(type(each).__name__ for each in group.exceptions)
            logger.warning("a connection of chat %s failed: %s", way.chat, names)
        finally:
            self._connections -= 1


class _Wire(ByteStream):
    """A stream that counts what passes and tells that something does."""

    def __init__(self, stream: ByteStream, stirred: Callable[[], None]) -> None:
        self.began = b""  # What was read too early.
        self.sent = self.received = 0
        self.stream = stream
        self._stirred = stirred

    async def receive(self, max_bytes: int = BATCH) -> bytes:
        if not self.began:
            self.began = await self.stream.receive(max_bytes)
            self.received += len(self.began)
            self._stirred()
        data, self.began = self.began[:max_bytes], self.began[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        await self.stream.send(item)
        self.sent += len(item)
        self._stirred()

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self.stream)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self.stream.extra_attributes


@dataclass
class _Server:
    """What a connection leads to."""

    target: Target
    rule: Rule
    wire: _Wire
    began_s: float
    peer: Peer


class _Connection:
    """One connection from inside, and where it leads."""

    def __init__(self, proxy: Proxy, stream: ByteStream, way: Way) -> None:
        self._proxy = proxy
        self._way = way
        self._idle, self._patience_s = anyio.CancelScope(), _IDLE_S
        self._wire = _Wire(stream, self._stir)
        self._client = Peer(self._wire, h11.SERVER)
        self._secure = False
        self._target: Target | None = None
        self._server: _Server | None = None

    def _stir(self) -> None:
        self._idle.deadline = anyio.current_time() + self._patience_s

    async def run(self, *, full: bool) -> None:
        """Serve it until it ends, and tell why it is refused."""
        began_s = anyio.current_time()
        self._stir()
        try:
            with self._idle:
                await self._serve(full=full)
        except RefusedError as refused:
            await self._leave(told=bool(self._server and self._server.wire.sent))
            self._way.note(self._target, refused, 0, 0, _ms_since(began_s))
            said = f"network: refused {self._target or 'a request'}: {refused}"
            await self._client.refuse(said, refused)
        finally:
            await self._leave()

    async def _serve(self, *, full: bool) -> None:
        if full:
            raise RefusedError("too many connections are open", "limit")
        request = await self._client.head(first=True)
        if not request or request.method != b"CONNECT":
            await self._requests(request)
            return
        target = self._target = target_of(request.target)
        rule, server = self._judge(target), None
        if not rule.read and not self._proxy.secrets.bound(self._way.chat, target):
            server = await self._dial(target, rule)
        answer = h11.Response(status_code=200, headers=[], reason=b"Connection established")
        await self._client.send(answer)
        self._wire.began = self._client.http.trailing_data[0]
        await (self._tunnel(target, server.wire) if server else self._open(target))

    def _judge(self, target: Target) -> Rule:
        verdict = self._proxy.rules.judge(target, self._way.grants())
        if not verdict.rule:
            raise RefusedError(verdict.reason, "rule")
        return verdict.rule

    async def _tunnel(self, target: Target, server: _Wire) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._forward, server, self._wire)
                await self._check_hello(target)
                await self._forward(self._wire, server)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _forward(self, source: _Wire, sink: _Wire) -> None:
        async for data in source:
            await sink.send(data)
        self._patience_s = _ENDING_S
        self._stir()
        await sink.send_eof()

    async def _check_hello(self, target: Target) -> None:
        """Look at the first bytes: TLS has to name the host, and port 443 has to speak TLS."""
        data = b"" if target.port == 443 else await self._wire.receive()
        if target.port == 443 or data.startswith(_TLS):
            try:
                with anyio.fail_after(HEAD_S):
                    while (name := named_host(data)) is None:
                        data += await self._wire.receive()
            except TimeoutError as exc:
                raise RefusedError(f"no TLS hello came within {HEAD_S:g} s", "name") from exc
            if name != target.host:
                raise RefusedError("its TLS hello names another host", "name")
        self._wire.began = data

    async def _open(self, target: Target) -> None:
        await self._check_hello(target)
        self._secure = self._wire.began.startswith(_TLS)
        if not self._secure:
            self._client = Peer(self._wire, h11.SERVER)
            await self._requests(at=target)
            return
        context = await self._proxy.authority.context_for(target.host)
        try:
            with anyio.fail_after(HEAD_S):
                stream = await TLSStream.wrap(
                    self._wire, server_side=True, ssl_context=context, standard_compatible=False
                )
        except (ssl.SSLError, TimeoutError) as exc:
            why = "its TLS is opened here, and the program does not trust /etc/ssl/certs"
            raise RefusedError(why, "failed") from exc
        self._client = Peer(stream, h11.SERVER)
        await self._requests(at=target)
        with anyio.move_on_after(LAST_S):
            await stream.unwrap()

    async def _requests(self, request: h11.Request | None = None, at: Target | None = None) -> None:
        """Pass on one request after another; inside a tunnel all go to where it leads."""
        if at:
            request = await self._client.head()
        while request:
            self._target, path = (at, path_of(request)) if at else split_url(request.target)
            await self._pass_on(request, self._target, path)
            self._target = at
            request = await self._client.head() if self._client.next_cycle() else None

    async def _pass_on(self, request: h11.Request, target: Target, path: bytes) -> None:
        rule, mask, server = self._judge(target), None, self._server
        headers = outgoing(request, target, path, secure=self._secure, read=rule.read)
        if self._secure:
            headers, mask = await self._proxy.secrets.fill(self._way.chat, target, headers)
            headers = searchable(headers) if mask else headers
        if not server or server.target != target or not server.peer.is_free():
            server = await self._dial(target, rule, http=True)
        if self._upstream(rule) and not self._secure:
            path = f"http://{target}".encode() + path
        rewritten = h11.Request(method=request.method, target=path, headers=headers)
        await exchange(self._client, server.peer, rewritten, mask)

    def _upstream(self, rule: Rule) -> tuple[str, int] | None:
        return None if rule.private else self._proxy.upstream

    async def _dial(self, target: Target, rule: Rule, *, http: bool = False) -> _Server:
        """Connect to an address of the name, or by the proxy through which this machine goes."""
        await self._leave()
        began_s, upstream = anyio.current_time(), self._upstream(rule)
        try:
            with anyio.fail_after(_DIAL_S):
                if upstream:
                    stream: ByteStream = await anyio.connect_tcp(*upstream)
                else:
                    addresses = await addresses_of(target, private=rule.private)
                    stream = await _first(addresses[:_MOST_ADDRESSES], target.port)
                wire = _Wire(stream, self._stir)
                through = str(target) if upstream and (self._secure or not http) else ""
                peer = await self._greet(wire, target, through)
        except TimeoutError as exc:
            raise RefusedError(f"it did not answer within {_DIAL_S:g} s", "failed") from exc
        except ssl.SSLError as exc:
            why = getattr(exc, "verify_message", exc.reason)
            raise RefusedError(f"its TLS cannot be trusted: {why}", "failed") from exc
        except _HUNG_UP as exc:
            number = getattr(exc.__cause__ or exc, "errno", None)
            why = os.strerror(number) if number else "it hung up"
            raise RefusedError(f"it cannot be reached: {why}", "failed") from exc
        self._server = _Server(target, rule, wire, began_s, peer)
        return self._server

    async def _greet(self, wire: _Wire, target: Target, through: str) -> Peer:
        peer = Peer(wire, h11.CLIENT)
        try:
            if through:
                wire.began = await peer.connect(through)
            if self._secure:
                context = self._proxy.authority.outside
                tls = await TLSStream.wrap(wire, hostname=target.host, ssl_context=context)
                peer = Peer(tls, h11.CLIENT)
        except BaseException:
            await wire.aclose()
            raise
        return peer

    async def _leave(self, *, told: bool = True) -> None:
        """Hang up where the connection leads to, and tell what has passed."""
        if (server := self._server) is not None:
            self._server = None
            if told:
                wire, taken_ms = server.wire, _ms_since(server.began_s)
                self._way.note(server.target, server.rule, wire.sent, wire.received, taken_ms)
            await server.wire.aclose()


def _ms_since(began_s: float) -> float:
    return (anyio.current_time() - began_s) * 1000


async def _first(addresses: Sequence[str], port: int) -> ByteStream:
    """A connection to the first address that takes one. Raises OSError."""
    problem: OSError = TimeoutError()
    for address in addresses:
        with anyio.move_on_after(_DIAL_S / len(addresses)):
            try:
                return await anyio.connect_tcp(address, port)
            except OSError as exc:
                problem = exc
    raise problem
