"""A proxy behind a real port, and real servers on this machine's loopback to go to."""

import socket
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import trustme
from anyio.abc import SocketStream, UNIXSocketStream
from anyio.streams.tls import TLSListener

from mcp_sandbox.config import AllowConfig, EgressConfig, SecretConfig
from mcp_sandbox.egress.authority import CertificateAuthority
from mcp_sandbox.egress.process.keeper import Keeper
from mcp_sandbox.egress.process.proxy import ProxiedConnection, Proxy
from mcp_sandbox.egress.rules import EgressRule, EgressRules
from mcp_sandbox.egress.secrets import Keys, Secrets
from mcp_sandbox.egress.settings import parse_rule, read_egress_rules
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.models import ChatId
from tests.streams import everything

CHAT = ChatId("local", "one")
HOST = "host.internal"
Serve = Callable[[Any], Awaitable[None]]


@dataclass
class World:
    """`port` is the proxy's; `noted` what it told, as (target, verdict or word, out, in)."""

    proxy: Proxy
    authority: CertificateAuthority
    tasks: anyio.abc.TaskGroup
    folder: Path
    secrets: Secrets
    port: int = 0
    url: str = ""
    noted: list[tuple[str, str, int, int]] = field(default_factory=list)
    grants: list[EgressRule] = field(default_factory=list)
    told: anyio.Event = field(default_factory=anyio.Event)

    def note(self, target: object, verdict: object, sent: int, received: int, ms: float) -> None:
        why = f"{verdict.verdict}: {verdict}" if isinstance(verdict, RefusedError) else "allowed"
        assert isinstance(verdict, RefusedError | EgressRule)
        self.noted.append((str(target), why, sent, received))
        self.told.set()
        self.told = anyio.Event()

    async def until_noted(self, count: int = 1) -> list[tuple[str, str, int, int]]:
        with anyio.fail_after(10):
            while len(self.noted) < count:
                await self.told.wait()
        return self.noted

    async def allow(self, *allow: Any, deny: Sequence[str] = ()) -> None:
        """These rules hold from now on; a port alone is a private one of this machine."""
        named = [
            AllowConfig(host=HOST, port=each, private=True) if isinstance(each, int) else each
            for each in allow
        ]
        settings = EgressConfig(allow=tuple(named), deny=tuple(deny))
        self.proxy.rules = await anyio.to_thread.run_sync(read_egress_rules, settings)

    async def answer(self, what: str, **said: Any) -> dict[str, Any]:
        """What the server says to the process that serves connections."""
        keys = Keys(self.proxy.rules, self.authority.leaf, self.secrets)
        return await keys.answer(CHAT, tuple(self.grants), {"t": what, **said})

    async def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
        """A program as it would run inside."""
        proxy, trusted = f"http://127.0.0.1:{self.port}", str(self.authority.bundle)
        lower = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), proxy)
        bundle = f"{trusted}/ca-certificates.crt"
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            **lower,
            "SSL_CERT_FILE": bundle,
            "CURL_CA_BUNDLE": bundle,
            "GIT_SSL_CAINFO": bundle,
            **variables,
        }
        with anyio.fail_after(50):
            return await anyio.run_process(command, env=env, check=False)

    async def curl(self, *args: str) -> str:
        """What curl prints: the answer, and the status behind it."""
        done = await self.run("curl", "-sS", "-w", "%{http_code}", *args)
        return (done.stdout + done.stderr).decode()

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def pair(self, stack: AsyncExitStack) -> UNIXSocketStream:
        """One end of a connection whose other end says nothing."""
        pair = [await UNIXSocketStream.from_socket(end) for end in socket.socketpair()]
        for each in pair:
            await stack.enter_async_context(each)
        return pair[0]

    async def say(self, data: bytes) -> bytes:
        """All that the proxy answers to these bytes."""
        async with await self.connect() as stream:
            await stream.send(data)
            return await everything(stream)

    async def listen(self, serve: Serve, *, tls: bool = False) -> int:
        """A server on the loopback; with TLS it is host.internal's."""
        listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port: int = listener.extra(anyio.abc.SocketAttribute.local_port)
        if tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            AUTHORITY.issue_cert(HOST).configure_cert(context)
            listener = TLSListener(listener, context, standard_compatible=False)

        async def serving() -> None:
            async with listener:
                await listener.serve(serve)

        self.tasks.start_soon(serving)
        return port


AUTHORITY = trustme.CA()


async def head(stream: Any) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    return data


@asynccontextmanager
async def a_world(
    folder: Path, *, secrets: dict[str, Any] | None = None, upstream: str = ""
) -> AsyncGenerator[World]:
    folder.mkdir(exist_ok=True)
    AUTHORITY.cert_pem.write_to_path(str(folder / "company.pem"))
    authority = await CertificateAuthority.open(folder / "authority", folder / "company.pem")
    given = {name: SecretConfig.model_validate(each) for name, each in (secrets or {}).items()}
    outside = ssl.create_default_context(cadata=authority.trusted.decode("ascii"))
    proxy = Proxy(EgressRules(), outside, upstream)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        world = World(proxy, authority, tasks, folder, Secrets(given, authority.seed))

        async def serve(stream: SocketStream) -> None:
            async with stream:
                keeper = Keeper(world.answer, world.secrets.bound(CHAT))
                await ProxiedConnection(proxy, stream, CHAT, keeper, world.note).serve()
                # A door waits likewise for the client to read what it was sent.
                with anyio.move_on_after(1):
                    await stream.send_eof()
                    await everything(stream)

        world.port = await world.listen(serve)
        yield world


def granted(host: str) -> EgressRule:
    return parse_rule(host, source="grant")
