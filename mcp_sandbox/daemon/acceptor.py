"""Accepts clients on the daemon's unix socket, limits their number, and reads their first line.

Only processes of the same user and root are accepted, as the kernel tells, before a byte of theirs
is read. Until its first line is complete a client gets little time and little memory. Nothing that
it sends is trusted.
"""

import hashlib
import json
import logging
import os
import re
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from anyio.streams.buffered import BufferedByteStream

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.daemon.lock import SocketListener
from mcp_sandbox.errors import InvalidArgument, OperatorError
from mcp_sandbox.models import ChatId

logger = logging.getLogger(__name__)
PROTOCOL = 1
GREETING_S = 10.0
MOST_UNPROVEN = 64
_LONGEST_GREETING = 64 << 10
_FRESH = re.compile(r"[0-9a-f]{16,64}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")
_HUNG_UP = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
)


@dataclass(frozen=True)
class ChatHello:
    """A client that works in a chat; `project` is the folder of this host in which it runs."""

    chat: ChatId
    project: Path | None
    line: Mapping[str, Any]  # Complete, with the settings of the client's environment.


@dataclass(frozen=True)
class ControlHello:
    """A person's command to the daemon."""

    command: str
    arguments: Mapping[str, Any]


def parse_hello(line: bytes) -> ChatHello | ControlHello:
    """Parse a client's first line.

    Raises InvalidArgument: the line is malformed, or names an invalid chat.
    """
    try:
        hello = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("the first line is not JSON: connect with `mcp-sandbox`") from exc
    if not isinstance(hello, dict) or hello.get("mcp-sandbox") != PROTOCOL:
        raise InvalidArgument(
            f'the first line must hold "mcp-sandbox": {PROTOCOL}: connect with the `mcp-sandbox` '
            "of this daemon's version"
        )
    if hello.get("role") == "chat":
        return ChatHello(_find_chat(hello), _read_project(hello), hello)
    if hello.get("role") == "control":
        arguments = hello.get("arguments", {})
        if not isinstance(arguments, dict):
            raise InvalidArgument('"arguments" must be an object')
        return ControlHello(_read_text(hello, "command") or "", arguments)
    raise InvalidArgument('"role" must be "chat" or "control"')


def _find_chat(message: Mapping[str, Any]) -> ChatId:
    user, named = _read_text(message, "user"), _read_text(message, "chat")
    if named is None:
        named = _read_text(message, "session")
    if named is None and (project := _read_project(message)):
        named = chat_of_project(project)
    if named is None:
        fresh = _read_text(message, "fresh") or ""
        if not _FRESH.fullmatch(fresh):
            raise InvalidArgument(
                'nothing says which chat this is: give "chat", "session", "project", or "fresh" '
                "with 16 to 64 hexadecimal digits"
            )
        named = f"fresh-{fresh}"
    return ChatId("local" if user is None else user, named)


def chat_of_project(project: Path) -> str:
    """Return the name of a folder's chat: a hash to make it unique, and a name for people."""
    name = _UNUSUAL.sub("-", project.name)[:60]
    digest = hashlib.sha256(str(project).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"dir-{name}-{digest}"


def _read_project(message: Mapping[str, Any]) -> Path | None:
    project = _read_text(message, "project")
    if project is None:
        return None
    try:
        absolute = os.fsencode(project).startswith(b"/") and "\0" not in project
    except UnicodeEncodeError:
        absolute = False
    if not absolute:
        raise InvalidArgument(f"project {project[:200]!r} is not an absolute path")
    return Path(project)


def _read_text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f'"{name}" must be text or null')
    return value


class TimedStream(BufferedByteStream):
    """A byte stream whose sending has a time limit."""

    async def tell(self, message: Mapping[str, Any]) -> None:
        await self.send(json.dumps(message).encode() + b"\n")

    async def send(self, item: bytes) -> None:
        # A client that reads nothing for so long is stuck, and must not block its calls.
        with anyio.move_on_after(300):
            await super().send(item)
            return
        await self.aclose()
        raise anyio.BrokenResourceError


Welcome = Callable[[TimedStream, ChatHello | ControlHello], Awaitable[None]]


class Acceptor:
    """Accepts clients until closed. `most`: connections at a time; `connected`: open ones now."""

    def __init__(self, listener: SocketListener, *, most: int) -> None:
        self._listener = listener
        self._most = most
        self.connected = 0
        self._unproven: OrderedDict[anyio.CancelScope, None] = OrderedDict()
        self._accepting = anyio.CancelScope()
        self._staying = anyio.CancelScope()
        self._left = anyio.Event()

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
        """Accept no more clients; those whose first line was read stay connected."""
        self._accepting.cancel()
        self._staying.cancel()
        for scope in self._unproven:
            scope.cancel()
        await to_thread.run_sync(self._listener.close)

    async def wait_until_empty(self) -> None:
        while self.connected:
            self._left = anyio.Event()
            await self._left.wait()

    async def _stay_in_place(self) -> None:
        """Make the socket again if its file is removed, such as at the end of a login session."""
        with self._staying:
            while True:
                await anyio.sleep(5)
                if await to_thread.run_sync(self._listener.is_in_place):
                    continue
                before = self._listener.socket
                try:
                    await to_thread.run_sync(self._listener.listen)
                except OperatorError as exc:
                    logger.warning("no client can reach this daemon: %s", exc)
                    continue
                anyio.notify_closing(before)
                before.close()
                logger.warning("the socket was removed; listening on %s again", self._listener.path)

    async def _accept(self, tasks: TaskGroup, welcome: Welcome) -> None:
        try:
            raw, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:
            logger.error("no connection can be accepted now: %s", exc.strerror)  # noqa: TRY400
            await anyio.sleep(0.2)
            return
        problem = self._find_problem(raw)
        if not problem:
            self.connected += 1
            tasks.start_soon(self._serve_client, raw, welcome)
            return
        # Say why, as far as the socket takes it at once, and hang up.
        with raw, suppress(OSError):
            raw.setblocking(False)
            raw.send(json.dumps({"ok": False, "error": problem}).encode() + b"\n")

    def _find_problem(self, raw: socket.socket) -> str | None:
        _, uid, _ = struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            logger.warning("refused a connection of the user with uid %d", uid)
            return "this daemon serves another user: start one of your own, without --socket"
        if self.connected >= self._most:
            logger.warning("refused a connection: %d are open", self.connected)
            text = "connections are open: close some, or set a higher serve.max_connections"
            return f"{self.connected} {text}"
        return None

    async def _serve_client(self, raw: socket.socket, welcome: Welcome) -> None:
        try:
            raw.setblocking(False)
            async with TimedStream(SocketStream(raw)) as connection:
                hello = await self._read_hello(connection)
                if hello is not None:
                    await welcome(connection, hello)
        except _HUNG_UP:
            logger.debug("a client hung up")
        except Exception:
            # An error with one client, even a bug, must not end the others.
            logger.exception("a connection failed unexpectedly")
        finally:
            raw.close()
            self.connected -= 1
            self._left.set()

    async def _read_hello(self, connection: TimedStream) -> ChatHello | ControlHello | None:
        """Return the client's parsed first line; tell the client and return None if unusable."""
        problem = f"no first line came within {GREETING_S:g} s"
        with self._limit_waiting() as scope:
            try:
                return parse_hello(await connection.receive_until(b"\n", _LONGEST_GREETING))
            except anyio.DelimiterNotFound:
                problem = f"the first line has more than {_LONGEST_GREETING} bytes"
            except InvalidArgument as exc:
                problem = str(exc)
        if scope.cancel_called and anyio.current_time() < scope.deadline:
            problem = "too many clients connect at once: try again"
        logger.warning("refused a client: %s", problem)
        await connection.tell({"ok": False, "error": problem})
        return None

    @contextmanager
    def _limit_waiting(self) -> Generator[anyio.CancelScope]:
        """Limit the time for a first line; if too many clients wait, drop the oldest."""
        with anyio.move_on_after(GREETING_S) as scope:
            self._unproven[scope] = None
            if len(self._unproven) > MOST_UNPROVEN:
                self._unproven.popitem(last=False)[0].cancel()
            try:
                yield scope
            finally:
                self._unproven.pop(scope, None)
