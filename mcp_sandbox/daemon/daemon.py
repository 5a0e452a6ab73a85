"""The life of a daemon: it serves chats, runs control commands, and ends when asked or idle."""

import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import anyio
from anyio import to_thread

from mcp_sandbox.config.sections import ServeConfig
from mcp_sandbox.daemon.acceptor import Acceptor, ChatHello, ControlHello, TimedStream
from mcp_sandbox.daemon.control_client import JsonObject
from mcp_sandbox.daemon.lock import DaemonLock
from mcp_sandbox.errors import InvalidArgument, SandboxError

logger = logging.getLogger(__name__)

ServeChat = Callable[[TimedStream, ChatHello], Awaitable[None]]
Command = Callable[[JsonObject], Awaitable[JsonObject]]
Conversation = Callable[[JsonObject, TimedStream], Awaitable[None]]
"""Takes arguments and the connection, which it owns from then on."""
Reason = Literal["signal", "shutdown", "idle", "hand-over"]

_LONGEST_LINE = 4000


class Shutdown:
    """Why the daemon is to end: the first reason counts; a second request ends calls at once.

    `let_go` makes calls that wait for a process return, while the process goes on.
    """

    def __init__(self) -> None:
        self.let_go: Callable[[], None] = lambda: None
        self.reason: Reason | None = None
        self.begun = anyio.Event()
        self.urgent = anyio.Event()
        self.claim_released = anyio.Event()

    def begin(self, reason: Reason) -> None:
        if self.reason is None:
            logger.info("the daemon ends: %s", reason)
            self.reason = reason
            self.begun.set()
        elif reason in ("signal", "shutdown"):
            self.urgent.set()

    async def in_time(self, finish: Callable[[float], Awaitable[object]], grace_s: float) -> None:
        """Let calls finish within `grace_s`, then return them; stop when it gets urgent."""

        async def hurry() -> None:
            await self.urgent.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hurry)
            until = anyio.current_time() + grace_s
            await finish(grace_s)
            if anyio.current_time() >= until:
                # Calls that can leave their process running return now.
                self.let_go()
                await finish(5)
            tasks.cancel_scope.cancel()


class RecentLog(logging.Handler):
    """Keeps the last lines of the log, numbered from 1, in the log's own format."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = deque[tuple[int, str]](maxlen=2000)
        self._numbers = count(1)
        handlers = logging.getLogger().handlers
        if handlers:
            self.setFormatter(handlers[0].formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((next(self._numbers), self.format(record)[:_LONGEST_LINE]))

    def after(self, number: int) -> Sequence[tuple[int, str]]:
        # Other threads also log.
        self.acquire()
        try:
            return [(at, line) for at, line in self._lines if at > number]
        finally:
            self.release()


@contextmanager
def recent_log() -> Generator[RecentLog]:
    """Keep what is logged while the block runs."""
    log = RecentLog()
    logging.getLogger().addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger().removeHandler(log)


@asynccontextmanager
async def while_connected(connection: TimedStream) -> AsyncGenerator[None]:
    """Cancel the block when the client hangs up; drop what it sends meanwhile."""

    async def watch() -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await connection.receive()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()


@dataclass(frozen=True)
class ControlCommands:
    """Runs one command per connection: `logs`, `shutdown`, `hand-over`, and those in `more`."""

    ending: Shutdown
    log: RecentLog
    more: Mapping[str, Command]
    conversations: Mapping[str, Conversation]

    async def answer(self, connection: TimedStream, message: ControlHello) -> None:
        """Run one command; cancel it if the client hangs up."""
        if conversation := self.conversations.get(message.command):
            try:
                await conversation(message.arguments, connection)
            except SandboxError as exc:
                await connection.tell({"error": str(exc)})
            return
        async with while_connected(connection):
            await connection.tell(await self._do(message, connection))

    async def _do(self, message: ControlHello, connection: TimedStream) -> JsonObject:
        if message.command == "logs":
            await self._send_log(message.arguments, connection)
            return {"result": {}}
        known = {"shutdown": self._shut_down, "hand-over": self._hand_over, **self.more}
        try:
            if message.command not in known:
                raise InvalidArgument(
                    f"there is no command {message.command[:60]!r}: the daemon knows "
                    f"{', '.join(['logs', *known])}"
                )
            return {"result": await known[message.command](message.arguments)}
        except SandboxError as exc:
            return {"error": str(exc)}

    async def _send_log(self, arguments: JsonObject, connection: TimedStream) -> None:
        wanted, lines = arguments.get("lines"), self.log.after(0)
        seen = lines[-1][0] if lines else 0
        if isinstance(wanted, int) and 0 <= wanted < len(lines):
            lines = lines[len(lines) - wanted :]
        while True:
            for number, line in lines:
                await connection.tell({"event": {"line": line}})
                seen = number
            if not arguments.get("follow") or self.ending.begun.is_set():
                return
            with anyio.move_on_after(0.2):
                await self.ending.begun.wait()
            lines = self.log.after(seen)

    async def _shut_down(self, _arguments: JsonObject) -> JsonObject:
        self.ending.begin("shutdown")
        return {}

    async def _hand_over(self, _arguments: JsonObject) -> JsonObject:
        """Return when another daemon may take the data root; running calls go on."""
        self.ending.begin("hand-over")
        await self.ending.claim_released.wait()
        return {}


@dataclass(frozen=True)
class Daemon:
    """Serves the clients that the door accepts, until the ending.

    `in_use`: whether it is needed without clients; `notice`: more fields for a chat's first answer.
    """

    claim: DaemonLock
    door: Acceptor
    ending: Shutdown
    settings: ServeConfig
    in_use: Callable[[], bool]
    notice: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, str]]]

    async def run(self, serve_chat: ServeChat, control: ControlCommands) -> None:
        """Serve until the daemon may end: running calls have finished or had their time."""

        async def welcome(connection: TimedStream, message: ChatHello | ControlHello) -> None:
            who = {"ok": True, "version": self.claim.holder.version, "pid": os.getpid()}
            if isinstance(message, ControlHello):
                await connection.tell(who)
                await control.answer(connection, message)
            else:
                more = await self.notice(message.line)
                await connection.tell({**who, "chat": str(message.chat), **more})
                await serve_chat(connection, message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_when_idle)
            tasks.start_soon(self.door.admit, welcome)
            await self.ending.begun.wait()
            await self._leave()
            tasks.cancel_scope.cancel()

    async def _end_when_idle(self) -> None:
        limit = self.settings.idle_exit
        if not limit:
            return
        idle_since = anyio.current_time()
        while anyio.current_time() - idle_since < limit:
            await anyio.sleep(min(limit / 4, 30))
            if self.door.connected or self.in_use():
                idle_since = anyio.current_time()
        self.ending.begin("idle")

    async def _leave(self) -> None:
        """Accept no more clients, and wait until all have left or the time is up."""

        async def see_out(limit_s: float) -> None:
            with anyio.move_on_after(limit_s):
                await self.door.wait_until_empty()

        await to_thread.run_sync(self.claim.announce_leaving)
        await self.door.close()
        if self.ending.reason == "hand-over":
            await to_thread.run_sync(self.claim.release)
            self.ending.claim_released.set()
        await self.ending.in_time(see_out, self.settings.grace)
