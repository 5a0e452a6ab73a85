"""The ways out of a sandbox: end it, leave it to others, find out what it died of.

Whoever calls has the chat's lock. Whether a sandbox is still used is its runner's to say.
"""

import logging
from dataclasses import dataclass

import anyio

from mcp_sandbox.errors import OperatorError, SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Refusal, Runtime
from mcp_sandbox.sessions.obituary import cause
from mcp_sandbox.sessions.rooms import Held, Rooms
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

# Ending a sandbox takes the engine up to some seconds; a stuck engine must not hold us longer.
_DESTROY_S = 20.0
# A process that is being killed closes its connections first.
DYING_S = 1.0
# Long: under heavy load the answer is slow, and who does not answer is ended.
_ANSWER_S = 15.0


@dataclass(frozen=True)
class Fate:
    """What became of a sandbox that we lost: it `lives` on for others, or why not, if known."""

    lives: bool = False
    cause: str = ""


class Leaving:
    """The ways out of the sandbox of one chat."""

    def __init__(self, chat: ChatId, rooms: Rooms) -> None:
        self._chat = chat
        self._rooms = rooms

    async def retire(self, held: Held, *, background_too: bool) -> Refusal:
        """End it and hang up, unless it is used; when other servers use it, only hang up.

        Returns why it goes on, if it does: then, but for other servers, it is still ours.
        """
        refusal: Refusal = ""
        try:
            with anyio.fail_after(_ANSWER_S):
                if held.paused:
                    await held.sandbox.resume()
                    held.paused = False
                refusal = await held.runtime.retire(background_too=background_too, leaving=True)
        except (SandboxError, TimeoutError):
            logger.info("sandbox %s does not answer, and is removed", held.sandbox.id)
        if refusal == "users":
            await held.runtime.aclose()
            self._tell("sandbox left to others", held)
        elif not refusal:
            await self.destroy(held)
        return refusal

    async def bury(self, held: Held) -> Fate:
        """Find out what has become of a sandbox that we lost, and remove what is left of it."""
        died_of = await self._cause(held)
        await held.runtime.aclose()
        silent = held.runtime.silent
        if not died_of and not silent and await self._lives_for_others(held):
            return Fate(lives=True)
        await self.destroy(held)
        return Fate(cause=died_of)

    async def destroy(self, held: Held) -> None:
        """End it, whoever uses it."""
        with anyio.move_on_after(_DESTROY_S, shield=True) as limit:
            await held.runtime.aclose()
            try:
                await self._rooms.backend.destroy(held.sandbox.id)
            except OperatorError as exc:
                # Not the trouble of who asked for something else: the runner ends itself, too.
                logger.warning("sandbox %s could not be removed: %s", held.sandbox.id, exc)
        if limit.cancelled_caught:
            logger.error("sandbox %s could not be removed in time", held.sandbox.id)
        else:
            self._tell("sandbox removed", held)

    async def _cause(self, held: Held) -> str:
        try:
            ending = await held.sandbox.ending(within_s=DYING_S)
        except OperatorError as exc:
            return f"where it ran nobody answers ({exc})"
        return cause(ending, self._rooms.settings.limits) if ending else ""

    async def _lives_for_others(self, held: Held) -> bool:
        """Only our connection was lost, and other servers still have theirs; else it may end."""
        try:
            with anyio.fail_after(_ANSWER_S):
                async with anyio.create_task_group() as tasks:
                    channel = Channel(await held.sandbox.open_channel(), held.sandbox.token)
                    await channel.open(tasks)
                    runtime = Runtime(channel, keep_bytes=0)
                    refusal = await runtime.retire(background_too=True, leaving=True)
                    await runtime.aclose()
        except* (SandboxError, TimeoutError):
            refusal = ""
        return refusal == "users"

    def _tell(self, what: str, held: Held) -> None:
        backend = self._rooms.backend.name
        event(logger, what, chat=str(self._chat), backend=backend, sandbox=held.sandbox.id)
