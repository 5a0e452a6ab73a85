"""What a person may ask of the daemon: one command a connection."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from mcp_sandbox.daemon.connection import Connection
from mcp_sandbox.daemon.ending import Ending
from mcp_sandbox.daemon.greeting import ControlGreeting
from mcp_sandbox.errors import InvalidArgument, SandboxError

JsonObject = Mapping[str, Any]
Command = Callable[[JsonObject], Awaitable[JsonObject]]


class Control:
    """Answers control connections."""

    def __init__(self, ending: Ending, *, status: Callable[[], JsonObject]) -> None:
        self._ending = ending
        self._status = status
        self._commands: Mapping[str, Command] = {
            "status": self._tell_status,
            "shutdown": self._shut_down,
            "hand-over": self._hand_over,
        }

    async def answer(self, connection: Connection, said: ControlGreeting) -> None:
        """Do one command; a client that hangs up meanwhile wants it no more."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, connection, tasks.cancel_scope)
            await connection.tell(await self._do(said))
            tasks.cancel_scope.cancel()

    async def _do(self, said: ControlGreeting) -> JsonObject:
        command = self._commands.get(said.command)
        try:
            if command is None:
                raise InvalidArgument(
                    f"there is no command {said.command[:60]!r}: the daemon knows "
                    f"{', '.join(self._commands)}"
                )
            return {"result": await command(said.arguments)}
        except SandboxError as exc:
            return {"error": str(exc)}

    async def _tell_status(self, _arguments: JsonObject) -> JsonObject:
        return self._status()

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
