"""The daemon's unix socket: whose it is, who may come in, and how many at once.

Only processes of our own user (and root) get in, by the kernel's word and before a byte of theirs
is read. Who has not said yet what it wants has little time and little room.
"""

import json
import logging
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup, UNIXSocketStream

from mcp_sandbox.daemon import greeting
from mcp_sandbox.daemon.connection import Connection
from mcp_sandbox.daemon.greeting import ChatGreeting, ControlGreeting, parse_greeting
from mcp_sandbox.daemon.listener import Listener
from mcp_sandbox.errors import InvalidArgument, OperatorError

logger = logging.getLogger(__name__)

Welcome = Callable[[Connection, ChatGreeting | ControlGreeting], Awaitable[None]]

GREETING_S = 10.0
MOST_UNPROVEN = 64
_NO_MORE_FILES_S = 0.2
_LOOK_S = 5.0
_HUNG_UP = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
)


class Door:
    """Lets clients in until it is closed. `most`: connections at a time."""

    def __init__(self, listener: Listener, *, most: int) -> None:
        self._listener = listener
        self._most = most
        self._connected = 0
        self._unproven: OrderedDict[anyio.CancelScope, None] = OrderedDict()
        self._accepting = anyio.CancelScope()
        self._staying = anyio.CancelScope()
        self._left = anyio.Event()

    @property
    def connected(self) -> int:
        """How many connections are open."""
        return self._connected

    async def admit(self, welcome: Welcome) -> None:
        """Hand every connection to `welcome`, each in a task of its own, until `close`."""
        async with anyio.create_task_group() as tasks:
            with self._accepting:
                tasks.start_soon(self._stay_in_place)
                while True:
                    with suppress(anyio.ClosedResourceError):
                        await anyio.wait_readable(self._listener.socket)
                        await self._accept(tasks, welcome)

    async def close(self) -> None:
        """Let nobody in any more; who has said what it wants stays."""
        self._accepting.cancel()
        self._staying.cancel()
        for scope in self._unproven:
            scope.cancel()
        await to_thread.run_sync(self._listener.close)

    async def wait_until_empty(self) -> None:
        """Return when nobody is connected any more."""
        while self._connected:
            self._left = anyio.Event()
            await self._left.wait()

    async def _stay_in_place(self) -> None:
        """Come back when somebody takes the socket away, such as the end of a login session."""
        with self._staying:
            while True:
                await anyio.sleep(_LOOK_S)
                if not await to_thread.run_sync(self._listener.is_in_place):
                    await self._come_back()

    async def _come_back(self) -> None:
        try:
            before = await to_thread.run_sync(self._listener.renew)
        except OperatorError as exc:
            logger.warning("no client can find this daemon: %s", exc)
            return
        anyio.notify_closing(before)
        before.close()
        logger.warning("the socket was taken away; listening on %s again", self._listener.path)

    async def _accept(self, tasks: TaskGroup, welcome: Welcome) -> None:
        try:
            raw, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:
            logger.error("no connection can be accepted now: %s", exc.strerror)  # noqa: TRY400
            await anyio.sleep(_NO_MORE_FILES_S)
            return
        problem = self._problem(raw)
        if problem:
            _refuse(raw, problem)
        else:
            self._connected += 1
            tasks.start_soon(self._meet, raw, welcome)

    def _problem(self, raw: socket.socket) -> str | None:
        _, uid, _ = struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            logger.warning("refused a connection of the user with uid %d", uid)
            return "this daemon serves another user: start one of your own, without --socket"
        if self._connected >= self._most:
            logger.warning("refused a connection: %d are open", self._connected)
            return f"{self._connected} connections are open: close some, or set a higher " + (
                "serve.max_connections"
            )
        return None

    async def _meet(self, raw: socket.socket, welcome: Welcome) -> None:
        try:
            raw.setblocking(False)
            async with Connection(await UNIXSocketStream.from_socket(raw)) as connection:
                said = await self._greeting(connection)
                if said is not None:
                    await welcome(connection, said)
        except _HUNG_UP:
            logger.debug("a client hung up")
        except Exception:
            # One client's trouble, and be it a fault of ours, is not the others'.
            logger.exception("a connection failed unexpectedly")
        finally:
            raw.close()
            self._connected -= 1
            self._left.set()

    async def _greeting(self, connection: Connection) -> ChatGreeting | ControlGreeting | None:
        """What the client says it wants; one that says nothing usable is told so."""
        problem = f"no first line came within {GREETING_S:g} s"
        with self._waiting_room() as scope:
            try:
                return parse_greeting(await connection.line(greeting.MAX_BYTES))
            except anyio.DelimiterNotFound:
                problem = f"the first line has more than {greeting.MAX_BYTES} bytes"
            except InvalidArgument as exc:
                problem = str(exc)
        if scope.cancel_called and anyio.current_time() < scope.deadline:
            problem = "too many clients connect at once: try again"
        logger.warning("refused a client: %s", problem)
        await connection.tell({"ok": False, "error": problem})
        return None

    @contextmanager
    def _waiting_room(self) -> Generator[anyio.CancelScope]:
        """Time and room are small: when it is full, the one that waits for longest must go."""
        with anyio.move_on_after(GREETING_S) as scope:
            self._unproven[scope] = None
            if len(self._unproven) > MOST_UNPROVEN:
                self._unproven.popitem(last=False)[0].cancel()
            try:
                yield scope
            finally:
                self._unproven.pop(scope, None)


def _refuse(raw: socket.socket, problem: str) -> None:
    """Say why, as far as the socket takes it at once, and hang up."""
    with raw:
        raw.setblocking(False)
        try:
            raw.send(json.dumps({"ok": False, "error": problem}).encode() + b"\n")
        except OSError:
            logger.debug("a refused client does not listen")
