"""The proxy that programs inside speak to: CONNECT and HTTP/1.1 with whole URLs, nothing else.

It reads a connection's first request, finds the rule, checks the name and the address, connects,
and passes bytes both ways. An error ends only the connection in which it occurs. Which host a TLS
client asks for is read by a bounded parser of its first message (RFC 8446 section 4.1.2; the name
by RFC 6066 section 3).
"""

import logging
import ssl
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSStream

from mcp_sandbox.egress.link import HUNG_UP
from mcp_sandbox.egress.process.http_requests import (
    BATCH,
    HEAD_S,
    STATUS,
    Peer,
    begin,
    build_headers,
    exchange,
    explain_failure,
)
from mcp_sandbox.egress.process.keeper import Keeper
from mcp_sandbox.egress.rules import EgressRule, EgressRules
from mcp_sandbox.egress.targets import (
    RefusedError,
    Target,
    normalize_host,
    parse_target,
    resolve_addresses,
    split_url,
)
from mcp_sandbox.models import ChatId

LARGEST = 16 << 10
"""The longest message that is read, in bytes."""
_RECORDS = 64  # Clients send one to three.
_ALERT, _HANDSHAKE, _MAJOR_VERSION = b"\x15", b"\x16", b"\x03"
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
# The random by which a ServerHello asks for a second ClientHello (RFC 8446 section 4.1.3).
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_UNTIL_RANDOM = 43
logger = logging.getLogger(__name__)

_MOST = 1024
# A DNS look-up may hang for half a minute; look-ups of other chats do not wait for it.
_MOST_LOOKING = 8
_DIAL_S, _IDLE_S = 10.0, 15 * 60.0
# How long grants count for the further requests of a connection.
_GRANTS_S = 0.5
# How long a half-closed connection may be silent; and how long a client may take to hang up.
_ENDING_S, _LAST_S = 15.0, 1.0

Look = Callable[[bytes], object]
Note = Callable[[Target | None, EgressRule | RefusedError, int, int, float], None]
"""Called once for each allowed connection and each refusal: bytes out, bytes in, ms."""


def read_server_name(data: bytes) -> str | None:
    """Return the host that a ClientHello names (SNI), or None while it is incomplete.

    `data` is everything received so far.

    Raises RefusedError: it names no host or several, is no ClientHello, or is larger than 16 KiB.
    """
    hello = _hello(data)
    return _name(hello[0]) if hello else None


def find_record_end(data: bytes, host: str) -> int:
    """Return where the first TLS record ends, or the ClientHello in it and the next; 0: not yet.

    Raises RefusedError: it is a message of a handshake, and no ClientHello that names the host.
    """
    if data[:1] != _HANDSHAKE:
        end = 5 + int.from_bytes(data[3:5])
        return end if len(data) >= end else 0
    if (hello := _hello(data)) is None:
        return 0
    if _name(hello[0]) != host:
        raise _refused("names another host")
    return hello[1]


class ServerHello:
    """The beginning of what a server sends: whether a ClientHello may still follow."""

    _seen = b""

    def add(self, data: bytes) -> None:
        self._seen += data[: _UNTIL_RANDOM - len(self._seen)]

    @property
    def is_retry(self) -> bool:
        return self._seen[11:] == _RETRY

    @property
    def is_final(self) -> bool:
        """Whether it ends the handshake or goes on with it; until that is known, it does not."""
        whole = len(self._seen) == _UNTIL_RANDOM and self._seen[5] == _SERVER_HELLO
        return self._seen[:1] == _ALERT or (whole and not self.is_retry)


def _name(message: bytes) -> str:
    names = [value for kind, value in _extensions(message) if kind == 0]
    if len(names) != 1:
        raise _refused("names no host (SNI)" if not names else "names several hosts (SNI)")
    entries, end = _vector(names[0], 2)
    name, further = _vector(entries[1:], 2)
    if end or further or entries[0] != 0:
        raise _refused("names several hosts (SNI)")
    try:
        return normalize_host(name)
    except RefusedError as exc:
        raise _refused(f"names a host (SNI) that cannot be one: {exc}") from exc


def _hello(data: bytes) -> tuple[bytes, int] | None:
    """Return the body of the ClientHello, joined from its records, and where they end.

    None: it is incomplete.
    """
    joined, at = b"", 0
    for _ in range(_RECORDS):
        head = data[at : at + 5]
        if head[:1] not in (b"", _HANDSHAKE) or head[1:2] not in (b"", _MAJOR_VERSION):
            raise _refused("is none")
        size = int.from_bytes(head[3:])
        if len(head) == 5 and not 0 < size <= LARGEST:
            raise _refused("is malformed")
        joined += data[at + 5 : at + 5 + size]
        if joined and joined[0] != _CLIENT_HELLO:
            raise _refused("is none")
        end = 4 + int.from_bytes(joined[1:4])
        if len(joined) >= 4 and end > LARGEST:
            raise _refused("is larger than 16 KiB")
        at += 5 + size
        if len(joined) > end >= 4:
            # A server might take what follows for its second hello.
            raise _refused("is not the last message of its record")
        if len(data) < max(at, 5):
            return None
        if len(joined) == end:
            return joined[4:], at
    raise _refused("comes in too many records")


def _extensions(message: bytes) -> list[tuple[int, bytes]]:
    rest = message[34:]  # After version and random.
    for size in (1, 2, 1):  # Session, cipher suites, compression.
        _, rest = _vector(rest, size)
    extensions, end = _vector(rest, 2) if rest else (b"", b"")
    if end:
        raise _refused("is malformed")
    found = list[tuple[int, bytes]]()
    while extensions:
        kind = int.from_bytes(extensions[:2])
        value, extensions = _vector(extensions[2:], 2)
        found.append((kind, value))
    return found


def _vector(data: bytes, size: int) -> tuple[bytes, bytes]:
    """Return the bytes whose length is in the first `size` bytes, and what follows them."""
    end = size + int.from_bytes(data[:size])
    if len(data) < max(size, end):
        raise _refused("is malformed")
    return data[size:end], data[end:]


def _refused(how: str) -> RefusedError:
    return RefusedError(f"its TLS hello {how}", "name")


@dataclass
class Proxy:
    """What all connections share; `upstream` is the next proxy, http://HOST:PORT, or empty.

    `outside` is the TLS context for real servers. Of `most` connections no user has more than half
    and no chat more than an eighth; `open` has them by their last activity.
    """

    rules: EgressRules
    outside: ssl.SSLContext
    upstream: str = ""
    most: int = _MOST
    open: "dict[ProxiedConnection, float]" = field(default_factory=dict)
    looking: WeakValueDictionary[ChatId, anyio.CapacityLimiter] = field(
        default_factory=WeakValueDictionary
    )

    def admit(self, came: "ProxiedConnection") -> None:
        """Let a connection in; where a share is full, end the longest idle one of who has most.

        Raises RefusedError: it would be one of the same chat, which has not been idle for long.
        """
        users = [each for each in self.open if each.chat.user == came.chat.user]
        chats = [each for each in users if each.chat == came.chat]
        shares = (chats, self.most // 8), (users, self.most // 2), ([*self.open], self.most)
        for share, most in shares:
            if len(share) >= most:
                [(largest, count)] = Counter(each.chat for each in share).most_common(1)
                first = next(each for each in share if each.chat == largest)
                idle_s = anyio.current_time() - self.open[first]
                if count <= len(chats) + 1 and idle_s < _ENDING_S:
                    raise RefusedError("too many connections are open", "limit")
                first.end()
                del self.open[first]
        self.open[came] = anyio.current_time()


class _CountingStream(BufferedByteStream):
    """A stream that counts bytes and reports activity."""

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


class ProxiedConnection:
    """One connection from inside a chat's sandbox, and where it leads."""

    def __init__(
        self, proxy: Proxy, stream: ByteStream, chat: ChatId, keeper: Keeper, note: Note
    ) -> None:
        self.chat = chat
        self._proxy, self._keeper, self._note = proxy, keeper, note
        self._grants: Sequence[EgressRule] = ()
        self._known_s = 0.0
        self._looking = proxy.looking.setdefault(chat, anyio.CapacityLimiter(_MOST_LOOKING))
        self._idle, self._patience_s = anyio.CancelScope(), _IDLE_S
        self.end = self._idle.cancel
        self._wire = _CountingStream(stream, self._stir)
        self._client = Peer(self._wire, h11.SERVER)
        self._secure = False
        self._target: Target | None = None

    def _stir(self) -> None:
        now_s = anyio.current_time()
        self._idle.deadline = now_s + self._patience_s
        if self._proxy.open.pop(self, None) is not None:
            self._proxy.open[self] = now_s

    def _end_soon(self) -> None:
        self._patience_s = _ENDING_S
        self._stir()

    async def serve(self) -> None:
        """Serve the connection until it ends; no error leaves this method."""
        try:
            await self._run()
        except* HUNG_UP:
            pass
        except* Exception as group:  # noqa: BLE001 - one connection must not end the others
            # The messages are left out: a client or server may have written them.
            names = ", ".join(type(each).__name__ for each in group.exceptions)
            logger.warning("a connection of chat %s failed: %s", self.chat, names)
        finally:
            self._proxy.open.pop(self, None)

    async def _run(self) -> None:
        began_s = anyio.current_time()
        self._stir()
        try:
            with self._idle:
                await self._serve()
        except* RefusedError as group:
            refused = group.exceptions[0]
            assert isinstance(refused, RefusedError)  # noqa: S101 - one task group at a time
            self._note(self._target, refused, 0, 0, (anyio.current_time() - began_s) * 1000)
            message = f"network: refused {self._target or 'a request'}: {refused}"
            status, kind = STATUS.get(refused.verdict, 403), "text/plain; charset=utf-8"
            # Some programs show only the reason phrase of a proxy's answer, not its body.
            await self._client.answer(status, kind, f"{message}\n".encode(), message.encode())

    async def _serve(self) -> None:
        self._proxy.admit(self)
        await self._learn_grants()
        request = await self._client.head(first=True)
        if not request or request.method != b"CONNECT":
            await self._requests(request)
            return
        target = self._target = parse_target(request.target)
        rule = self._judge(target)
        agreed = h11.Response(status_code=200, headers=[], reason=b"Connection established")
        self._wire.feed_data(self._client.http.trailing_data[0])
        if rule.read or self._keeper.is_bound(target):
            await self._client.send(agreed)
            await self._open(target)
        else:
            async with self._dial(target, rule) as server:
                await self._client.send(agreed)
                await self._tunnel(target, server.stream)

    async def _learn_grants(self) -> None:
        self._grants, self._known_s = await self._keeper.grants(), anyio.current_time()

    def _judge(self, target: Target) -> EgressRule:
        rule, reason = self._proxy.rules.judge(target, self._grants)
        if not rule:
            raise RefusedError(reason, "rule")
        return rule

    async def _tunnel(self, target: Target, server: ByteStream) -> None:
        async with anyio.create_task_group() as tasks:
            answer = ServerHello()
            tasks.start_soon(self._forward, server, self._wire, answer.add)
            if await self._is_tls(target):
                await self._greet(target, server, answer)
            await self._forward(self._wire, server)

    async def _greet(self, target: Target, server: ByteStream, answer: ServerHello) -> None:
        """Pass on TLS records until the server takes a hello; each hello must name the target."""
        data, is_second = b"", False
        with suppress(anyio.EndOfStream):
            while not (answer.is_final or is_second):
                data += await self._wire.receive()
                while not answer.is_final and (end := find_record_end(data, target.host)):
                    is_second = answer.is_retry and data.startswith(_HANDSHAKE)
                    await server.send(data[:end])
                    data = data[end:]
        if data:
            await server.send(data)

    async def _forward(self, source: ByteStream, sink: ByteStream, look: Look = bool) -> None:
        async for data in source:
            look(data)
            await sink.send(data)
        self._end_soon()
        await sink.send_eof()

    async def _is_tls(self, target: Target) -> bool:
        """Check the first bytes: TLS must name the host, and port 443 must speak TLS."""
        data = b"" if target.port == 443 else await self._wire.receive()
        is_tls = target.port == 443 or data.startswith(_HANDSHAKE)
        if is_tls:
            try:
                with anyio.fail_after(HEAD_S):
                    while (name := read_server_name(data)) is None:
                        data += await self._wire.receive()
            except TimeoutError as exc:
                raise RefusedError(f"no TLS hello came within {HEAD_S:g} s", "name") from exc
            if name != target.host:
                raise RefusedError("its TLS hello names another host", "name")
        self._wire.feed_data(data)
        return is_tls

    async def _open(self, target: Target) -> None:
        self._secure = await self._is_tls(target)
        stream = await self._tls(target) if self._secure else self._wire
        self._client = Peer(stream, h11.SERVER)
        await self._requests(await self._client.head(), target)
        if isinstance(stream, TLSStream):
            with anyio.move_on_after(_LAST_S):
                await stream.unwrap()

    async def _tls(self, target: Target) -> TLSStream:
        context = await self._keeper.context(target)
        try:
            with anyio.fail_after(HEAD_S):
                return await TLSStream.wrap(
                    self._wire, server_side=True, ssl_context=context, standard_compatible=False
                )
        except (ssl.SSLError, TimeoutError) as exc:
            why = "its TLS is read by the proxy, and the program does not trust /etc/ssl/certs"
            raise RefusedError(why, "failed") from exc

    async def _requests(self, request: h11.Request | None, at: Target | None = None) -> None:
        """Pass on one request after another; inside a tunnel all go to its target."""
        while request:
            self._target, path = (at, request.target) if at else split_url(request.target)
            await self._pass_on(request, self._target, path)
            self._target = at
            if set(self._client.http.states.values()) != {h11.DONE}:
                return
            self._client.http.start_next_cycle()
            request = await self._client.head()

    async def _pass_on(self, request: h11.Request, target: Target, path: bytes) -> None:
        if anyio.current_time() - self._known_s > _GRANTS_S:
            await self._learn_grants()
        rule, mask = self._judge(target), None
        headers = build_headers(request, target, path, secure=self._secure, read=rule.read)
        if self._secure:
            headers, mask = await self._keeper.fill(target, headers)
        elif self._upstream(rule):
            path = f"http://{target}".encode() + path
        rewritten = h11.Request(method=request.method, target=path, headers=headers)
        begun = await begin(self._client, rewritten, read=rule.read)
        async with self._dial(target, rule, http=True) as server:
            await exchange(self._client, server, begun, mask, self._end_soon)

    def _upstream(self, rule: EgressRule) -> tuple[str, int] | None:
        url = urlsplit("" if rule.private else self._proxy.upstream)
        return (url.hostname, url.port) if url.hostname and url.port else None

    async def _reach(self, target: Target, rule: EgressRule) -> ByteStream:
        """Connect to the first address that accepts, or to the next proxy. Raises OSError."""
        if upstream := self._upstream(rule):
            return await anyio.connect_tcp(*upstream)
        found = await resolve_addresses(target, private=rule.private, limiter=self._looking)
        for address in found[:-1]:
            with suppress(OSError):
                return await anyio.connect_tcp(address, target.port)
        return await anyio.connect_tcp(found[-1], target.port)

    @asynccontextmanager
    async def _dial(
        self, target: Target, rule: EgressRule, *, http: bool = False
    ) -> AsyncGenerator[Peer]:
        """Connect to a target, directly or through this machine's own proxy."""
        began_s = anyio.current_time()
        async with AsyncExitStack() as stack:
            try:
                with anyio.fail_after(_DIAL_S):
                    stream = await stack.enter_async_context(await self._reach(target, rule))
                    wire = _CountingStream(stream, self._stir)
                    server = Peer(wire, h11.CLIENT)
                    if self._upstream(rule) and (self._secure or not http):
                        wire.feed_data(await server.connect(str(target)))
                    if self._secure:
                        context = self._proxy.outside
                        tls = await TLSStream.wrap(wire, hostname=target.host, ssl_context=context)
                        server = Peer(tls, h11.CLIENT)
            except HUNG_UP as exc:
                raise RefusedError(explain_failure(exc), "failed") from exc
            try:
                yield server
            finally:
                # A refusal before the first byte is reported only as a refusal.
                if wire.sent + wire.received or not isinstance(sys.exception(), Exception):
                    taken_ms = (anyio.current_time() - began_s) * 1000
                    self._note(target, rule, wire.sent, wire.received, taken_ms)
