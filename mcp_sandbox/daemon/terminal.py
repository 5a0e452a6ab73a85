"""`shell`: joins a person's terminal to a shell in a chat's sandbox."""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict

import anyio

from mcp_sandbox.daemon.connection import Connection
from mcp_sandbox.daemon.control import JsonObject
from mcp_sandbox.errors import InvalidArgument, SandboxError
from mcp_sandbox.models import TerminalEnd
from mcp_sandbox.runner.frames import END, ERROR, MAX_BYTES, FrameError, Frames, frame, size
from mcp_sandbox.sessions.session import Session

_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class Shells:
    """Conversations about shells. `session` finds the chat that a command's arguments mean."""

    def __init__(self, session: Callable[[JsonObject], Awaitable[Session]]) -> None:
        self._session = session

    async def open(self, arguments: JsonObject, connection: Connection) -> None:
        """Say that frames follow, and pass them on both ways until the shell ends.

        Raises:
            SandboxError: it cannot begin; nothing has been said.
        """
        session = await self._session(arguments)
        first = size(_positive(arguments, "rows"), _positive(arguments, "columns"))
        tty = bool(arguments.get("tty", True))
        env = {"TERM": _terminal_type(arguments)} if tty else {}
        args = {"env": env, "tty": tty, "command": arguments.get("command", [])}
        shown = Frames()
        await connection.tell({"event": {"chat": str(session.chat)}})

        async def show(data: bytes) -> None:
            for kind, content in shown.feed(data):
                if kind not in (END, ERROR):
                    await connection.send(frame(kind, content))

        async with aclosing(_typed(first, connection)) as typed:
            try:
                ended = await session.shell.run(typed, show, args=args)
            except (SandboxError, FrameError) as exc:
                await connection.send(frame(ERROR, str(exc).encode()[:MAX_BYTES]))
            else:
                await connection.send(frame(END, _told(ended)))


async def _typed(first: bytes, connection: Connection) -> AsyncGenerator[bytes]:
    """The person's frames as they come; the runner, who reads them, checks them."""
    yield first
    while True:
        try:
            data = await connection.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
        yield data


def _told(ended: TerminalEnd) -> bytes:
    return json.dumps(asdict(ended)).encode()


def _terminal_type(arguments: JsonObject) -> str:
    term = arguments.get("term")
    return term if isinstance(term, str) and _TERM.fullmatch(term) else "xterm-256color"


def _positive(arguments: JsonObject, name: str) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or not 0 < value < 65536:
        raise InvalidArgument(f"{name!r} must be a number from 1 to 65535")
    return value
