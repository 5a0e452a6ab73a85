"""The proxy that programs inside speak to: CONNECT and HTTP/1.1 with whole URLs, nothing else.

One connection: its head, the rule, the name, the address, a dial, and bytes both ways. What any of
them throws ends that connection alone.
"""

import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSStream

from mcp_sandbox.egress.addresses import addresses_of
from mcp_sandbox.egress.authority import Authority
from mcp_sandbox.egress.hello import named_host
from mcp_sandbox.egress.opened import BATCH, HEAD_S, HUNG_UP, Peer, exchange, outgoing
from mcp_sandbox.egress.rules import Rule, Rules
from mcp_sandbox.egress.secrets import Secrets
from mcp_sandbox.egress.targets import RefusedError, Target, split_url, target_of
from mcp_sandbox.models import ChatId

logger = logging.getLogger(__name__)

_MOST, _MOST_ADDRESSES = 1024, 4
# Names whose servers are silent must not keep the look-ups of other chats waiting.
_MOST_LOOKING = 8
_DIAL_S, _IDLE_S = 10.0, 15 * 60.0
# How long a connection may be silent of which one side has ended; and a client may take its leave.
_ENDING_S, _LAST_S = 15.0, 1.0
_TLS = b"\x16"

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
        self.connections = 0
        self.looking = WeakValueDictionary[ChatId, anyio.CapacityLimiter]()

    async def serve(self, stream: ByteStream, way: Way) -> None:
        """Serve one connection until it is to be closed, whatever comes."""
        self.connections += 1
        try:
            await _Connection(self, stream, way).run()
        except* HUNG_UP:
            pass
        except* Exception as group:  # noqa: BLE001 - one connection must not end the others
            # Without its words, which may be a client's or a server's.
            names = ", ".join(type(each).__name__ for each in group.exceptions)
            logger.warning("a connection of chat %s failed: %s", way.chat, names)
        finally:
            self.connections -= 1


class _Wire(BufferedByteStream):
    """A stream that counts what passes and tells that something does."""

    def __init__(self, stream: ByteStream, stirred: Callable[[], None]) -> None:
        super().__init__(stream)
        self.sent = self.received = 0
        self._stirred = stirred

    async def receive(self, max_bytes: int = BATCH) -> bytes:
        data = await super().receive(max_bytes)
        self.received += len(data)
        self._stirred()
        return data

    async def send(self, item: bytes) -> None:
        await super().send(item)
        self.sent += len(item)
        self._stirred()


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
        limiter = anyio.CapacityLimiter(_MOST_LOOKING)
        self._looking = proxy.looking.setdefault(way.chat, limiter)
        self._idle, self._patience_s = anyio.CancelScope(), _IDLE_S
        self._wire = _Wire(stream, self._stir)
        self._client = Peer(self._wire, h11.SERVER)
        self._secure = False
        self._target: Target | None = None
        self._server: _Server | None = None

    def _stir(self) -> None:
        self._idle.deadline = anyio.current_time() + self._patience_s

    def _end_soon(self) -> None:
        self._patience_s = _ENDING_S
        self._stir()

    async def run(self) -> None:
        """Serve it until it ends, and tell why it is refused."""
        began_s = anyio.current_time()
        self._stir()
        try:
            with self._idle:
                await self._serve()
        except* RefusedError as group:
            refused = group.exceptions[0]
            assert isinstance(refused, RefusedError)  # noqa: S101 - one task group at a time
            await self._leave(told=bool(self._server and self._server.wire.sent))
            self._way.note(self._target, refused, 0, 0, _ms_since(began_s))
            said = f"network: refused {self._target or 'a request'}: {refused}"
            await self._client.refuse(said, refused)
        finally:
            await self._leave()

    async def _serve(self) -> None:
        if self._proxy.connections > _MOST:
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
        self._wire.feed_data(self._client.http.trailing_data[0])
        await (self._tunnel(target, server.wire) if server else self._open(target))

    def _judge(self, target: Target) -> Rule:
        verdict = self._proxy.rules.judge(target, self._way.grants())
        if not verdict.rule:
            raise RefusedError(verdict.reason, "rule")
        return verdict.rule

    async def _tunnel(self, target: Target, server: _Wire) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._forward, server, self._wire)
            await self._is_tls(target)
            await self._forward(self._wire, server)

    async def _forward(self, source: _Wire, sink: _Wire) -> None:
        async for data in source:
            await sink.send(data)
        self._end_soon()
        await sink.send_eof()

    async def _is_tls(self, target: Target) -> bool:
        """Look at the first bytes: TLS has to name the host, and port 443 has to speak TLS."""
        data = b"" if target.port == 443 else await self._wire.receive()
        is_tls = target.port == 443 or data.startswith(_TLS)
        if is_tls:
            try:
                with anyio.fail_after(HEAD_S):
                    while (name := named_host(data)) is None:
                        data += await self._wire.receive()
            except TimeoutError as exc:
                raise RefusedError(f"no TLS hello came within {HEAD_S:g} s", "name") from exc
            if name != target.host:
                raise RefusedError("its TLS hello names another host", "name")
        self._wire.feed_data(data)
        return is_tls

    async def _open(self, target: Target) -> None:
        self._secure = await self._is_tls(target)
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
        with anyio.move_on_after(_LAST_S):
            await stream.unwrap()

    async def _requests(self, request: h11.Request | None = None, at: Target | None = None) -> None:
        """Pass on one request after another; inside a tunnel all go to where it leads."""
        if at:
            request = await self._client.head()
        while request:
            self._target, path = (at, request.target) if at else split_url(request.target)
            await self._pass_on(request, self._target, path)
            self._target = at
            request = await self._client.head() if self._client.next_cycle() else None

    async def _pass_on(self, request: h11.Request, target: Target, path: bytes) -> None:
        rule, mask, server, chat = self._judge(target), None, self._server, self._way.chat
        is_masked = self._secure and bool(self._proxy.secrets.bound(chat, target))
        to = target, path
        headers = outgoing(request, to, secure=self._secure, read=rule.read, whole=is_masked)
        if is_masked:
            headers, mask = await self._proxy.secrets.fill(chat, target, headers)
        if not server or server.target != target or not server.peer.is_free():
            server = await self._dial(target, rule, http=True)
        if self._upstream(rule) and not self._secure:
            path = f"http://{target}".encode() + path
        rewritten = h11.Request(method=request.method, target=path, headers=headers)
        await exchange(self._client, server.peer, rewritten, mask, self._end_soon)

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
                    async with self._looking:
                        addresses = await addresses_of(target, private=rule.private)
                    stream = await _first(addresses, target)
                wire = _Wire(stream, self._stir)
                server = self._server = _Server(target, rule, wire, began_s, Peer(wire, h11.CLIENT))
                if upstream and (self._secure or not http):
                    wire.feed_data(await server.peer.connect(str(target)))
                if self._secure:
                    context = self._proxy.authority.outside
                    tls = await TLSStream.wrap(wire, hostname=target.host, ssl_context=context)
                    server.peer = Peer(tls, h11.CLIENT)
        except HUNG_UP as exc:
            raise RefusedError(_why(exc), "failed") from exc
        return server

    async def _leave(self, *, told: bool = True) -> None:
        """Hang up where the connection leads to, and tell what has passed."""
        if (server := self._server) is not None:
            self._server = None
            if told:
                wire, taken_ms = server.wire, _ms_since(server.began_s)
                self._way.note(server.target, server.rule, wire.sent, wire.received, taken_ms)
            await anyio.aclose_forcefully(server.wire)


def _ms_since(began_s: float) -> float:
    return (anyio.current_time() - began_s) * 1000


async def _first(addresses: Sequence[str], target: Target) -> ByteStream:
    """A connection to the first address that takes one. Raises OSError."""
    problem: OSError = TimeoutError()
    for address in addresses[:_MOST_ADDRESSES]:
        with anyio.move_on_after(_DIAL_S / min(len(addresses), _MOST_ADDRESSES)):
            try:
                return await anyio.connect_tcp(address, target.port)
            except OSError as exc:
                problem = exc
    raise problem


def _why(failure: Exception) -> str:
    """Why a server cannot be spoken with, in a clause that names no address."""
    if isinstance(failure, TimeoutError):
        return f"it did not answer within {_DIAL_S:g} s"
    if isinstance(failure, ssl.SSLError):
        return f"its TLS cannot be trusted: {getattr(failure, 'verify_message', failure.reason)}"
    number = getattr(failure.__cause__ or failure, "errno", None)
    return f"it cannot be reached: {os.strerror(number) if number else 'it hung up'}"
