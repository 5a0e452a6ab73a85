"""The entry of the process: serves what comes by the link to the server, and ends with it."""

import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio
from anyio.abc import ByteStream, TaskGroup

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.egress.link import Files, Link, Rate
from mcp_sandbox.egress.process.gateway import Counts, Gateway, Service
from mcp_sandbox.egress.process.keeper import Ask, Keeper
from mcp_sandbox.egress.process.proxy import ProxiedConnection, Proxy
from mcp_sandbox.egress.process.visitors import UNKNOWN, LetIn, Visitors, pass_on
from mcp_sandbox.egress.process.walls import close_walls
from mcp_sandbox.egress.rules import EgressRule, EgressRules, read_rule
from mcp_sandbox.egress.targets import RefusedError, Target
from mcp_sandbox.errors import Busy, SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.call import JsonObject
from mcp_sandbox.runtime.channel import Channel, own_tasks
from mcp_sandbox.runtime.doors import Doors

logger = logging.getLogger(__name__)

# Of new connections out of one sandbox: so many at once, and a second.
_BURST, _PER_S = 256, 100.0

Serve = Callable[[ByteStream], Awaitable[None]]
Tell = Callable[..., None]


class Way:
    """One way out: how its connections are served, what it answers, and what ends with it."""

    def __init__(
        self, tasks: TaskGroup, serve: Serve, asked: Callable[[], JsonObject] = dict
    ) -> None:
        self.serve, self.asked = serve, asked
        self._tasks, self._running = tasks, set[anyio.CancelScope]()
        self.forget: Callable[[], object] = bool

    def start(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do some work, until the way ends."""
        scope = anyio.CancelScope()
        self._running.add(scope)
        self._tasks.start_soon(self._run, scope, work, args)

    async def _run(
        self, scope: anyio.CancelScope, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        try:
            with scope:
                await work(*args)
        except Exception:
            # The other ways go on.
            logger.exception("a way out failed")
        finally:
            self._running.discard(scope)

    def end(self) -> None:
        self.forget()
        for scope in self._running:
            scope.cancel()


class Connections:
    """The connections of one chat to allowed hosts."""

    def __init__(self, proxy: Proxy, chat: ChatId, keeper: Keeper, tell: Tell) -> None:
        self._proxy, self._chat, self._keeper, self._tell = proxy, chat, keeper, tell
        self._rate = Rate(_BURST, _PER_S)

    async def serve(self, stream: ByteStream) -> None:
        await anyio.sleep(self._rate.take())
        await ProxiedConnection(self._proxy, stream, self._chat, self._keeper, self._note).serve()

    def _note(
        self,
        target: Target | None,
        verdict: EgressRule | RefusedError,
        sent: int,
        received: int,
        ms: float,
    ) -> None:
        """Tell of a connection before its program learns how it ended."""
        word, why = "allowed", getattr(verdict, "source", str(verdict))
        if isinstance(verdict, RefusedError):
            word = verdict.verdict
        to = [target.host, target.port] if target else None
        self._tell("connection", to=to, word=word, why=why, sums=[sent, received, round(ms)])


class LogLines(logging.Handler):
    """Has the server log what is logged here, on one line each."""

    def __init__(self, link: Link) -> None:
        super().__init__(logging.WARNING)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a line."""
        failed = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._link.tell("log", line=(record.getMessage() + failed)[:500])


class Child:
    """The ways out that the server has handed over, by their numbers."""

    def __init__(self, sock: socket.socket) -> None:
        self.link = Link(sock, self._told, self._asked)
        self._begun, self._ways, self._names = b"", dict[int, Way](), dict[bytes, LetIn]()

    async def run(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            await self.link.run()
            self._tasks.cancel_scope.cancel()

    def _told(self, said: JsonObject, payload: bytes, files: Files) -> None:
        if said["t"] == "begin":
            self._begun += payload
            if not said["more"]:
                self._begin(json.loads(self._begun))
        elif said["t"] in ("egress", "gateway", "preview", "previews"):
            number, given = said["n"], json.loads(payload)
            tell, ask = partial(self.link.tell, n=number), partial(self.link.ask, n=number)
            self._ways[number] = getattr(self, f"_{said['t']}")(given, tell, ask, *files)
        elif (way := self._ways.get(said["n"])) is None:
            for each in files:
                each.close()
        elif said["t"] == "end":
            self._ways.pop(said["n"]).end()
        elif said["t"] == "stream":
            way.start(self._serve, way, files[0])
        else:
            way.start(self._listen, way, said, files[0])

    async def _asked(self, said: JsonObject) -> JsonObject:
        way = self._ways.get(said["n"])
        return way.asked() if way else {}

    def _begin(self, said: JsonObject) -> None:
        outside = ssl.create_default_context(cadata=said["trusted"])
        outside.set_alpn_protocols(["http/1.1"])
        allow, deny = (tuple(map(read_rule, said[name])) for name in ("allow", "deny"))
        self._proxy = Proxy(EgressRules(allow, deny), outside, said["upstream"], said["most"])

    def _egress(self, said: JsonObject, tell: Tell, ask: Ask) -> Way:
        keeper = Keeper(ask, [*map(read_rule, said["bound"])])
        connections = Connections(self._proxy, ChatId(*said["chat"]), keeper, tell)
        return Way(self._tasks, connections.serve)

    def _gateway(self, said: JsonObject, tell: Tell, ask: Ask) -> Way:
        service, chat = Service(**said["service"]), ChatId(*said["chat"])
        gateway = Gateway(
            service, chat, ask, self._proxy, lambda now: tell("counts", **asdict(now))
        )
        gateway.counts = Counts(**said["counts"])
        way = Way(self._tasks, gateway.serve, lambda: asdict(gateway.counts))
        way.start(gateway.close_at_end)
        return way

    def _preview(self, said: JsonObject, tell: Tell, _: Ask, *listening: socket.socket) -> Way:
        async def let_in(client: SocketStream, began: bytes) -> None:
            tell("visitor", client.hand_over(), payload=began)

        way, name = Way(self._tasks, ByteStream.aclose), said["name"].encode()
        if listening:
            way.start(Visitors({name + b".localhost": let_in}).serve, *listening, way.start)
        else:
            found = self._names[name] = partial(pass_on, partial(tell, "visitor"))
            way.forget = lambda: self._names[name] is found and self._names.pop(name)
        return way

    def _previews(self, _: JsonObject, _tell: Tell, _ask: Ask, listening: socket.socket) -> Way:
        way = Way(self._tasks, ByteStream.aclose)
        way.start(Visitors(self._names, *UNKNOWN).serve, listening, way.start)
        return way

    async def _serve(self, way: Way, sock: socket.socket) -> None:
        async with SocketStream(sock) as stream:
            await way.serve(stream)

    async def _listen(self, way: Way, said: JsonObject, sock: socket.socket) -> None:
        """Open a door on a channel whose token was proved; tell its port, and how it ended."""
        why, busy, at, most = "", False, said["at"], said["most"]
        try:
            async with SocketStream(sock) as stream, own_tasks() as tasks:
                frames = Channel(stream, b"", "doors")
                frames.begin(tasks)
                doors = Doors(frames)
                async with doors.listen(way.serve, at, most=most, shared=said["shared"]) as port:
                    self.link.tell("open", n=said["n"], port=port)
                    await doors.wait_ended()
        except SandboxError as exc:
            why, busy = str(exc), isinstance(exc, Busy)
        self.link.tell("ended", n=said["n"], why=why, busy=busy)


async def _run(sock: socket.socket) -> None:
    child = Child(sock)
    # What the libraries load late is loaded now.
    await anyio.to_thread.run_sync("host".encode, "idna")
    with suppress(OSError):
        await anyio.connect_tcp("localhost", 1)
    logging.getLogger().addHandler(LogLines(child.link))
    close_walls()
    # Of what a stranger says the log, or a terminal, gets escaped lines alone, by the link.
    os.dup2(1, 2)
    child.link.tell("ready")
    await child.run()


def main() -> None:
    """Serve by the socket whose descriptor is the first argument."""
    anyio.run(_run, socket.socket(fileno=int(sys.argv[1])))
