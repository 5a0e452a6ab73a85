"""Which chats are in use in any server, so that nobody removes their files."""

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_lock import ChatLocks
from mcp_sandbox.sessions.listing import chat_of


class Wards:
    """The chats of one data root, of this server (`own`) and of others."""

    def __init__(
        self, locks: ChatLocks, backend: Backend, own: Callable[[], Collection[ChatId]]
    ) -> None:
        self._locks = locks
        self._backend = backend
        self._own = own

    def lock(self, chat: ChatId) -> AbstractAsyncContextManager[None]:
        """Nobody opens or removes the chat meanwhile, in no server of this data root."""
        return self._locks.hold(chat)

    async def in_use(self) -> Collection[ChatId]:
        """The chats that have a sandbox, or are about to.

        Raises:
            BackendUnavailable: the engine does not say what runs.
        """
        running = [chat_of(info.labels) for info in await self._backend.running()]
        return {*self._own(), *(chat for chat in running if chat)}
