"""The proxy that programs inside speak to: CONNECT and HTTP/1.1 with whole URLs, nothing else.

One connection: its head, the rule, the name, the address, a dial, and bytes both ways. What any of
them throws ends that connection alone.
"""

import logging
import os
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from mcp_sandbox.egress.rules import Rule, Rules, Verdict
from mcp_sandbox.egress.secrets import Secrets
from mcp_sandbox.egress.targets import RefusedError, Target, split_url, target_of
from mcp_sandbox.models import ChatId

logger = logging.getLogger(__name__)

_MOST, _MOST_OF_CHAT = 1024, 128
_DIAL_S, _IDLE_S = 10.0, 15 * 60.0
# How long a tunnel may be silent of which one side has ended.
_ENDING_S = 15.0
_MOST_ADDRESSES = 4
_TLS = b"\x16"
_HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

Note = Callable[[Target | None, Verdict | RefusedError, int, int, float], None]
"""Told once a connection to a target, and once a refusal: bytes out, bytes in, milliseconds."""


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
        self.rules = rules
        self.authority = authority
        self.secrets = secrets
        url = urlsplit(upstream)
        self.upstream = (url.hostname, url.port) if url.hostname and url.port else None
        self._connections = Counter[ChatId]()

    async def serve(self, stream: ByteStream, way: Way) -> None:
        """Serve one connection to its end, whatever comes."""
        self._connections[way.chat] += 1
        connection = _Connection(self, stream, way)
        full = self._connections.total() > _MOST or self._connections[way.chat] > _MOST_OF_CHAT
        try:
            with connection.idle:
                await connection.serve(full=full)
        except* _HUNG_UP:
            pass
        except* Exception as group:  # noqa: BLE001 - one connection must not end the others
            # Without its words, which may be a client's or a server's.
            names = [type(each).__name__ for each in group.exceptions]
            logger.warning("a connection of chat %s failed: %s", way.chat, ", ".join(names))
        finally:
            self._connections[way.chat] -= 1
            self._connections += Counter()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)


class _Wire(ByteStream):
    """A stream that counts what passes."""

    def __init__(
        self,
        stream: ByteStream,
        stirred: Callable[[], None],
        ended: Callable[["_Wire"], None] | None = None,
    ) -> None:
        self.began = b""  # What was read too early.
        self.sent = self.received = 0
        self.ended = ended
        self._stream = stream
        self._stirred = stirred

    async def receive(self, max_bytes: int = BATCH) -> bytes:
        if self.began:
            data, self.began = self.began[:max_bytes], self.began[max_bytes:]
            return data
        data = await self._stream.receive(max_bytes)
        self.received += len(data)
        self._stirred()
        return data

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)
        self.sent += len(item)
        self._stirred()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        ended, self.ended = self.ended, None
        if ended:
            ended(self)
        await anyio.aclose_forcefully(self._stream)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes


@dataclass
class _Reached:
    """The server of the last request."""

    target: Target
    wire: _Wire
    peer: Peer


class _Connection:
    """One connection from inside, and where it leads."""

    def __init__(self, proxy: Proxy, stream: ByteStream, way: Way) -> None:
        self.idle = anyio.CancelScope()
        self._proxy = proxy
        self._way = way
        self._patience_s = _IDLE_S
        self._wire = _Wire(stream, self._stir)
        self._client = Peer(self._wire, h11.SERVER)
        self._reached: _Reached | None = None
        self._began = anyio.current_time()

    def _stir(self) -> None:
        self.idle.deadline = anyio.current_time() + self._patience_s

    async def serve(self, *, full: bool) -> None:
        self._stir()
        if full:
            refused = RefusedError("too many connections are open", "limit")
            await self._refuse(self._client, None, refused)
            return
        try:
            request = await self._client.head(first=True)
        except RefusedError as refused:
            await self._refuse(self._client, None, refused)
            return
        if request and request.method == b"CONNECT":
            await self._connect(request)
        elif request:
            await self._requests(self._client, request)

    async def _connect(self, request: h11.Request) -> None:
        target = server = None
        try:
            target = target_of(request.target)
            rule = self._judge(target)
            if not rule.read and not self._proxy.secrets.bound(self._way.chat, target):
                server = await self._dial(target, rule)
        except RefusedError as refused:
            await self._refuse(self._client, target, refused)
            return
        answer = h11.Response(status_code=200, headers=[], reason=b"Connection established")
        await self._client.send(answer)
        self._wire.began = self._client.http.trailing_data[0]
        try:
            if server:
                await self._tunnel(target, server)
            else:
                await self._open(target)
        except RefusedError as refused:
            self._note_refused(target, refused)

    def _judge(self, target: Target) -> Rule:
        verdict = self._proxy.rules.judge(target, self._way.grants())
        if not verdict.rule:
            raise RefusedError(verdict.reason, "rule")
        return verdict.rule

    async def _tunnel(self, target: Target, server: _Wire) -> None:
        async with server:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._forward, server, self._wire)
                    await self._check_hello(target)
                    await self._forward(self._wire, server)
            except BaseExceptionGroup as group:
                if isinstance(group.exceptions[0], RefusedError):
                    # That is what is told of this connection.
                    server.ended = None
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
        try:
            if target.port == 443 or data.startswith(_TLS):
                with anyio.fail_after(HEAD_S):
                    while (name := named_host(data)) is None:
                        data += await self._wire.receive()
                if name != target.host:
                    raise RefusedError("its TLS hello names another host", "name")
        except TimeoutError as exc:
            raise RefusedError(f"no TLS hello came within {HEAD_S:g} s", "name") from exc
        self._wire.began = data

    async def _open(self, target: Target) -> None:
        await self._check_hello(target)
        if not self._wire.began.startswith(_TLS):
            await self._requests(Peer(self._wire, h11.SERVER), at=target)
            return
        context = await self._proxy.authority.context_for(target.host)
        try:
            with anyio.fail_after(HEAD_S):
                stream = await TLSStream.wrap(
                    self._wire, server_side=True, ssl_context=context, standard_compatible=False
                )
        except (ssl.SSLError, TimeoutError) as exc:
            raise RefusedError(
                "its TLS is opened here, and the program does not trust "
                "/etc/ssl/certs/ca-certificates.crt",
                "failed",
            ) from exc
        await self._requests(Peer(stream, h11.SERVER), at=target, secure=True)
        with anyio.move_on_after(LAST_S):
            await stream.unwrap()

    async def _requests(
        self,
        client: Peer,
        request: h11.Request | None = None,
        *,
        at: Target | None = None,
        secure: bool = False,
    ) -> None:
        """Answer one request after another; inside a tunnel all go to where it leads."""
        target = at
        try:
            while request := request or await client.head(first=False):
                target = at
                target, path = (at, path_of(request)) if at else split_url(request.target)
                await self._pass_on(client, request, target, path, secure=secure)
                if not client.next_cycle():
                    return
                request = None
        except RefusedError as refused:
            await self._refuse(client, target, refused)
        finally:
            if self._reached:
                await self._reached.wire.aclose()

    async def _pass_on(
        self, client: Peer, request: h11.Request, target: Target, path: bytes, *, secure: bool
    ) -> None:
        rule, mask = self._judge(target), None
        headers = outgoing(request, target, path, secure=secure, read=rule.read)
        if secure:
            headers, mask = await self._proxy.secrets.fill(self._way.chat, target, headers)
            headers = searchable(headers) if mask else headers
        server = await self._server(target, rule, secure=secure)
        if not secure and self._proxy.upstream and not rule.private:
            path = f"http://{target}".encode() + path
        rewritten = h11.Request(method=request.method, target=path, headers=headers)
        await exchange(client, server, rewritten, mask)

    async def _server(self, target: Target, rule: Rule, *, secure: bool) -> Peer:
        """The server of the last request once more, if it can be, or a new one."""
        if (last := self._reached) is not None:
            if last.target == target and last.peer.next_cycle() and last.peer.is_silent():
                return last.peer
            await last.wire.aclose()
        wire = await self._dial(target, rule, plain=not secure)
        self._reached = _Reached(target, wire, Peer(wire, h11.CLIENT))
        if not secure:
            return self._reached.peer
        context = self._proxy.authority.client_context()
        try:
            with anyio.fail_after(_DIAL_S):
                stream = await TLSStream.wrap(wire, hostname=target.host, ssl_context=context)
        except ssl.SSLError as exc:
            why = getattr(exc, "verify_message", exc.reason)
            raise RefusedError(f"its TLS is not to be trusted ({why})", "failed") from exc
        except TimeoutError as exc:
            raise RefusedError(f"it spoke no TLS within {_DIAL_S:g} s", "failed") from exc
        except _HUNG_UP as exc:
            raise RefusedError("it hung up and spoke no TLS", "failed") from exc
        self._reached.peer = Peer(stream, h11.CLIENT)
        return self._reached.peer

    async def _dial(self, target: Target, rule: Rule, *, plain: bool = False) -> _Wire:
        """Connect to one of the addresses of the name, or by the proxy of this machine."""
        began = anyio.current_time()

        def ended(wire: _Wire) -> None:
            taken_ms = (anyio.current_time() - began) * 1000
            verdict = Verdict(rule, rule.source)
            self._way.note(target, verdict, wire.sent, wire.received, taken_ms)

        upstream = None if rule.private else self._proxy.upstream
        rest = b""
        try:
            with anyio.fail_after(_DIAL_S):
                if upstream and plain:
                    stream: ByteStream = await anyio.connect_tcp(*upstream)
                elif upstream:
                    stream, rest = await _through(upstream, target)
                else:
                    addresses = await addresses_of(target, private=rule.private)
                    stream = await _first(addresses, target.port)
        except TimeoutError as exc:
            raise RefusedError(f"it did not answer within {_DIAL_S:g} s", "failed") from exc
        except OSError as exc:
            number = getattr(exc.__cause__ or exc, "errno", None)
            why = os.strerror(number) if number else "every try failed"
            raise RefusedError(f"it cannot be reached ({why})", "failed") from exc
        wire = _Wire(stream, self._stir, ended)
        wire.began = rest
        return wire

    async def _refuse(self, client: Peer, target: Target | None, refused: RefusedError) -> None:
        self._note_refused(target, refused)
        with suppress(*_HUNG_UP):
            await client.refuse(f"network: refused {target or 'a request'}: {refused}", refused)

    def _note_refused(self, target: Target | None, refused: RefusedError) -> None:
        taken_ms = (anyio.current_time() - self._began) * 1000
        self._way.note(target, refused, 0, 0, taken_ms)


async def _first(addresses: Sequence[str], port: int) -> ByteStream:
    """A connection to the first address that takes one. Raises OSError."""
    problem = OSError()
    tried = addresses[:_MOST_ADDRESSES]
    for address in tried:
        with anyio.move_on_after(_DIAL_S / len(tried)):
            try:
                return await anyio.connect_tcp(address, port)
            except OSError as exc:
                problem = exc
    raise problem if problem.__cause__ else TimeoutError


async def _through(upstream: tuple[str, int], target: Target) -> tuple[ByteStream, bytes]:
    """A connection by a proxy, and what has come by it. Raises OSError, RefusedError."""
    stream = await anyio.connect_tcp(*upstream)
    peer = Peer(stream, h11.CLIENT)
    try:
        headers = [("Host", str(target))]
        asked = h11.Request(method="CONNECT", target=str(target), headers=headers)
        await peer.send(asked, h11.EndOfMessage())
        [answer] = await peer.events()
        status = answer.status_code if isinstance(answer, h11.Response) else 0
        if not 200 <= status < 300:
            why = f"the proxy of this machine refuses it ({status})"
            raise RefusedError(why, "failed")  # noqa: TRY301
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    return stream, peer.http.trailing_data[0]
