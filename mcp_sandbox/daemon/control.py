"""What a person may ask of the daemon: one command a connection."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from mcp_sandbox.daemon.connection import Connection
from mcp_sandbox.daemon.ending import Ending
from mcp_sandbox.daemon.greeting import ControlGreeting
from mcp_sandbox.daemon.recent_log import RecentLog
from mcp_sandbox.errors import InvalidArgument, SandboxError

JsonObject = Mapping[str, Any]
Command = Callable[[JsonObject], Awaitable[JsonObject]]
"""Takes arguments; returns the result."""
Conversation = Callable[[JsonObject, Connection], Awaitable[None]]
"""Takes arguments and the connection, which is its own from then on."""

_LOOK_S = 0.2


class Control:
    """Answers control connections: with `logs`, `shutdown`, `hand-over` and `more`."""

    def __init__(
        self,
        ending: Ending,
        log: RecentLog,
        *,
        more: Mapping[str, Command],
        conversations: Mapping[str, Conversation],
    ) -> None:
        self._ending = ending
        self._log = log
        self._conversations = conversations
        self._commands: Mapping[str, Command] = {
            "shutdown": self._shut_down,
            "hand-over": self._hand_over,
            **more,
        }

    async def answer(self, connection: Connection, said: ControlGreeting) -> None:
        """Do one command; a client that hangs up meanwhile wants it no more."""
        if conversation := self._conversations.get(said.command):
            try:
                await conversation(said.arguments, connection)
            except SandboxError as exc:
                await connection.tell({"error": str(exc)})
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, connection, tasks.cancel_scope)
            await connection.tell(await self._do(said, connection))
            tasks.cancel_scope.cancel()

    async def _do(self, said: ControlGreeting, connection: Connection) -> JsonObject:
        if said.command == "logs":
            await self._logs(said.arguments, connection)
            return {"result": {}}
        command = self._commands.get(said.command)
        try:
            if command is None:
                raise InvalidArgument(
                    f"there is no command {said.command[:60]!r}: the daemon knows "
                    f"{', '.join(['logs', *self._commands])}"
                )
            return {"result": await command(said.arguments)}
        except SandboxError as exc:
            return {"error": str(exc)}

    async def _logs(self, arguments: JsonObject, connection: Connection) -> None:
        """Tell the last `lines` lines, and with `follow` those that come until the ending."""
        wanted = arguments.get("lines")
        lines = self._log.after(0)
        seen = lines[-1][0] if lines else 0
        if isinstance(wanted, int) and wanted >= 0:
            lines = lines[len(lines) - wanted :] if wanted < len(lines) else lines
        while True:
            for number, line in lines:
                await connection.tell({"event": {"line": line}})
                seen = number
            if not arguments.get("follow") or self._ending.begun.is_set():
                return
            with anyio.move_on_after(_LOOK_S):
                await self._ending.begun.wait()
            lines = self._log.after(seen)

    async def _shut_down(self, _arguments: JsonObject) -> JsonObject:
        self._ending.begin("shutdown")
        return {}

    async def _hand_over(self, _arguments: JsonObject) -> JsonObject:
        """Return when another daemon may take the data root; what runs here goes on."""
        self._ending.begin("hand-over")
        await self._ending.claim_released.wait()
        return {}


async def _cancel_when_gone(connection: Connection, scope: anyio.CancelScope) -> None:
    try:
        while True:
            await connection.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        scope.cancel()
