"""A model service on loopback that a test scripts byte by byte, and a program's way to it."""

import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import trustme
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

from mcp_sandbox.agents.connectors import find_connector
from mcp_sandbox.agents.gateway import Gateway, open_gateway
from mcp_sandbox.config import ConnectorConfig, EgressConfig, RunConfig
from mcp_sandbox.egress.settings import load_trusted
from mcp_sandbox.egress.ways_out import WaysOut, open_ways_out
from mcp_sandbox.models import ChatId
from tests.streams import everything

KEY = "sk-marked-key-of-the-operator"
CHAT = ChatId("alice", "one")
OPENAI: dict[str, Any] = {"protocol": "openai"}
MESSAGE = {"model": "big", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True)
class Heard:
    """A request as the service got it."""

    line: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


Answer = Callable[[Any], Awaitable[None]]


@dataclass
class Service:
    """What it was asked, and how it answers; `gone` is set when a client has hung up."""

    url: str = ""
    heard: list[Heard] = field(default_factory=list)
    answer: Answer = field(default_factory=lambda: saying(b'{"usage": {"output_tokens": 1}}'))
    asked: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, stream: ByteStream) -> None:
        try:
            async with stream:
                requests = BufferedByteReceiveStream(stream)
                while True:
                    head = await requests.receive_until(b"\r\n\r\n", 1 << 16)
                    line, *rest = head.decode("latin-1").split("\r\n")
                    headers = dict(each.lower().split(": ", 1) for each in rest)
                    size = int(headers.get("content-length", 0))
                    raw = await requests.receive_exactly(size) if size else b""
                    # Of the headers, as they were written.
                    headers = {each.split(": ")[0].lower(): each.split(": ", 1)[1] for each in rest}
                    self.heard.append(Heard(line, headers, raw))
                    self.asked.set()
                    await self.answer(stream)
        except (anyio.EndOfStream, anyio.IncompleteRead):
            pass
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self.gone.set()


def saying(body: bytes, status: str = "200 OK", **headers: str) -> Answer:
    """Answer so, with a length."""
    fields = {"content-type": "application/json", **headers, "content-length": str(len(body))}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())

    async def answer(stream: SocketStream) -> None:
        await stream.send(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

    return answer


async def hanging(stream: ByteStream) -> None:
    """Answer nothing until the client has gone."""
    await everything(stream)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def told(**event: Any) -> bytes:
    """One event of a stream."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


@dataclass
class Inside:
    """A run as its program sees it: a port that leads to the gateway, and a token."""

    gateway: Gateway
    ways_out: WaysOut
    service: Service
    port: int
    client: httpx2.AsyncClient

    async def post(self, body: Any = MESSAGE, path: str = "/v1/messages") -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def say(self, data: bytes) -> bytes:
        """All that is answered to these bytes, until the connection is closed."""
        async with await self.connect() as stream:
            with anyio.move_on_after(20) as scope:
                with suppress(anyio.BrokenResourceError):
                    await stream.send(data)
                return await everything(stream)
        assert not scope.cancelled_caught, "the connection was left open"
        return b""

    async def serve(self, stream: Any) -> None:
        """Serve a connection as one of a door, until both sides have ended it."""
        await lead(self.ways_out, self.gateway, stream)

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    def head(self, first: str = "POST /v1/messages", *lines: str) -> bytes:
        """The beginning of a request with the token."""
        fields = (f"{first} HTTP/1.1", "Host: x", f"x-api-key: {self.gateway.token}", *lines)
        return "\r\n".join([*fields, "", ""]).encode()


async def lead(ways_out: WaysOut, gateway: Gateway, stream: Any) -> None:
    """Let a connection of a program lead to its gateway."""
    with suppress(anyio.ClosedResourceError):
        async with await ways_out.connect(gateway.way) as line, anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, stream, line)
            await _copy(line, stream)


async def _copy(source: Any, sink: Any) -> None:
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for data in source:
            await sink.send(data)
        await sink.send_eof()


@asynccontextmanager
async def a_service(authority: trustme.CA | None = None) -> AsyncGenerator[Service]:
    """A service; by HTTPS, as localhost, if an authority vouches for it."""
    service = Service()
    async with anyio.create_task_group() as tasks:
        serve: Callable[[Any], Awaitable[None]] = service.serve
        if authority:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert("localhost").configure_cert(context)
            serve = partial(_over_tls, context, service)
        port = await listen(tasks, serve)
        service.url = f"https://localhost:{port}" if authority else f"http://127.0.0.1:{port}"
        yield service
        tasks.cancel_scope.cancel()


async def _over_tls(context: ssl.SSLContext, service: Service, stream: SocketStream) -> None:
    async with stream:
        with suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            wrap = TLSStream.wrap(stream, ssl_context=context, standard_compatible=False)
            await service.serve(await wrap)


async def listen(tasks: anyio.abc.TaskGroup, serve: Callable[[Any], Awaitable[None]]) -> int:
    listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def serving() -> None:
        async with listener:
            await listener.serve(serve)

    tasks.start_soon(serving)
    port: int = listener.extra(SocketAttribute.local_port)
    return port


@asynccontextmanager
async def a_run(
    folder: Path,
    service: Service,
    *,
    chat: ChatId = CHAT,
    limits: RunConfig | None = None,
    silent_s: float = 30,
    egress: EgressConfig | None = None,
    **settings: Any,
) -> AsyncGenerator[Inside]:
    """A gateway to the service, at a port that stands for a door."""
    file = folder / "key"
    if not file.exists():
        file.write_text(KEY + "\n")
        file.chmod(0o600)
    version = "/v1" if settings.get("protocol") == "openai" else ""
    given = {"url": service.url + version, "key": f"file:{file}", **settings}
    connector = find_connector({"one": ConnectorConfig.model_validate(given)})
    limits, egress = limits or RunConfig(), egress or EgressConfig()
    load = partial(load_trusted, egress.ca_bundle)
    async with (
        open_ways_out(load, upstream=egress.upstream_proxy) as ways_out,
        open_gateway(
            connector, chat=chat, limits=limits, ways_out=ways_out, silent_s=silent_s
        ) as gateway,
        anyio.create_task_group() as tasks,
    ):

        async def serve(stream: SocketStream) -> None:
            async with stream:
                await lead(ways_out, gateway, stream)
                # A door waits likewise for the client to read what it was sent.
                with anyio.move_on_after(1), suppress(anyio.BrokenResourceError):
                    await stream.send_eof()
                    await everything(stream)

        port = await listen(tasks, serve)
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"x-api-key": gateway.token},
            timeout=30,
            trust_env=False,
        ) as client:
            yield Inside(gateway, ways_out, service, port, client)
        tasks.cancel_scope.cancel()
