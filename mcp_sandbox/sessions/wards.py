"""Which chats are in use in any server, and which sandboxes are nobody's."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager

import anyio

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.errors import OperatorError, SandboxGone
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.sessions.chat_lock import ChatLocks
from mcp_sandbox.sessions.listing import chat_of
from mcp_sandbox.sessions.residence import Residence
from mcp_sandbox.workspace.directory import Workspaces

logger = logging.getLogger(__name__)

# Servers that live shorter have no time for the work of others.
_SETTLED_S = 5.0


class Wards:
    """The chats of one data root, of this server (`own`) and of others."""

    def __init__(
        self,
        backend: Backend,
        workspaces: Workspaces,
        locks: ChatLocks,
        residence: Residence,
        *,
        own: Callable[[], Collection[ChatId]],
    ) -> None:
        self._backend = backend
        self._workspaces = workspaces
        self._locks = locks
        self._residence = residence
        self._own = own

    def lock(self, chat: ChatId) -> AbstractAsyncContextManager[None]:
        """Nobody opens or removes the chat meanwhile, in no server of this data root."""
        return self._locks.hold(chat)

    async def in_use(self) -> Collection[ChatId]:
        """The chats that have a sandbox, or are about to.

        Raises:
            BackendUnavailable: the engine does not say what runs.
        """
        return {*self._own(), *(await self.sandboxes()).values()}

    async def sandboxes(self) -> Mapping[SandboxId, ChatId]:
        """What runs, for which chats.

        Raises:
            BackendUnavailable: the engine does not say what runs.
        """
        running = {info.id: chat_of(info.labels) for info in await self._backend.running()}
        return {sandbox_id: chat for sandbox_id, chat in running.items() if chat}

    async def end_leftover(self, sandbox_id: SandboxId, chat: ChatId) -> bool:
        """End a sandbox unless its chat has files, or got some meanwhile; whether it did.

        Raises:
            OperatorError: the engine or the data root cannot be used.
        """
        async with self.lock(chat):
            if chat in await self._workspaces.chats():
                return False
            logger.info("removing sandbox %s: chat %s has no files", sandbox_id, chat)
            await self._backend.destroy(sandbox_id)
        return True

    async def wake(self) -> None:
        """Let go on, after a while, what a killed server left paused: then it ends by itself."""
        await anyio.sleep(_SETTLED_S)
        try:
            for info in await self._backend.running():
                chat = chat_of(info.labels)
                if chat is not None and info.state == "paused":
                    async with self.lock(chat):
                        await self._backend.attach(info.id)
        except (OperatorError, SandboxGone) as exc:
            logger.info("what another server paused is left as it is: %s", exc)

    async def forget(self, chat: ChatId) -> None:
        """The chat has no files any more."""
        await self._residence.forget(chat)
