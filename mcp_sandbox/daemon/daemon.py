"""The life of a daemon: it listens, serves, and ends when it is asked or when nobody needs it."""

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox.daemon.connection import Connection
from mcp_sandbox.daemon.control import Control
from mcp_sandbox.daemon.door import Door
from mcp_sandbox.daemon.ending import Ending
from mcp_sandbox.daemon.greeting import ChatGreeting, ControlGreeting
from mcp_sandbox.daemon.lock import Claim

ServeChat = Callable[[Connection, ChatGreeting], Awaitable[None]]

_LOOK_S = 30.0


@dataclass(frozen=True)
class Patience:
    """How long the daemon waits, in seconds; `idle_exit_s` 0 = for ever."""

    idle_exit_s: float
    grace_s: float


class Daemon:
    """Serves who comes through the door until the ending.

    `in_use` tells whether something must go on without clients; `notice` what else these hear.
    """

    def __init__(
        self,
        claim: Claim,
        door: Door,
        ending: Ending,
        patience: Patience,
        *,
        in_use: Callable[[], bool],
        notice: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._claim = claim
        self._door = door
        self._ending = ending
        self._patience = patience
        self._in_use = in_use
        self._notice = notice

    async def run(self, serve_chat: ServeChat, control: Control) -> None:
        """Return when the daemon may end: running calls have finished or had their time."""

        async def welcome(connection: Connection, said: ChatGreeting | ControlGreeting) -> None:
            who = {"ok": True, "version": self._claim.holder.version, "pid": os.getpid()}
            if isinstance(said, ControlGreeting):
                await connection.tell(who)
                await control.answer(connection, said)
            else:
                more = await self._notice(said.said)
                await connection.tell({**who, "chat": str(said.chat), **more})
                await serve_chat(connection, said)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_when_idle)
            tasks.start_soon(self._door.admit, welcome)
            await self._ending.begun.wait()
            await self._leave()
            tasks.cancel_scope.cancel()

    async def _end_when_idle(self) -> None:
        limit = self._patience.idle_exit_s
        if not limit:
            return
        idle_since = anyio.current_time()
        while anyio.current_time() - idle_since < limit:
            await anyio.sleep(min(limit / 4, _LOOK_S))
            if self._door.connected or self._in_use():
                idle_since = anyio.current_time()
        self._ending.begin("idle")

    async def _leave(self) -> None:
        """Close the door, and wait until everybody has left or the time is up."""
        await to_thread.run_sync(self._claim.announce_leaving)
        await self._door.close()
        if self._ending.reason == "hand-over":
            await to_thread.run_sync(self._claim.release)
            self._ending.claim_released.set()
        await self._ending.in_time(self._see_out, self._patience.grace_s)

    async def _see_out(self, limit_s: float) -> None:
        with anyio.move_on_after(limit_s):
            await self._door.wait_until_empty()
