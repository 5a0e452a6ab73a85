"""One server at a time finds, makes, pauses or ends the sandbox of a chat.

    {data root}/sandbox/locks/{user}/chat-{chat}

The kernel lets go of a lock when the process that has it dies, however it dies.
"""

import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.errors import BackendUnavailable, StorageUnavailable
from mcp_sandbox.models import ChatId

# A thread that waits in the kernel could not be cancelled.
_LOOK_AGAIN_S = (0.002, 0.1)
# Longer than it takes to make a sandbox, and to copy a project into it.
_LONG_S = 240.0


class ChatLocks:
    """The locks of all chats of one data root."""

    def __init__(self, data_root: Path) -> None:
        self._folder = data_root / "sandbox" / "locks"

    @asynccontextmanager
    async def hold(self, chat: ChatId) -> AsyncGenerator[None]:
        """Have the chat for this server alone; waits for whoever has it.

        Not for a task that has it already: it would wait for itself.

        Raises:
            StorageUnavailable: the data root cannot be written.
            BackendUnavailable: somebody has it for too long.
        """
        descriptor = await self._take(chat, _LONG_S)
        if descriptor is None:
            raise BackendUnavailable(
                "another server of this data directory has been busy with the sandbox of chat "
                f"{chat} for {_LONG_S:g} s: see which one with `mcp-sandbox status`, and end it"
            )
        try:
            yield
        finally:
            _let_go(descriptor)

    @asynccontextmanager
    async def hold_at_once(self, chat: ChatId) -> AsyncGenerator[bool]:
        """The same without waiting; False: somebody else has it.

        Raises:
            StorageUnavailable: the data root cannot be written.
        """
        descriptor = await self._take(chat, 0)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                _let_go(descriptor)

    async def _take(self, chat: ChatId, wait_s: float) -> int | None:
        pause_s, longest_s = _LOOK_AGAIN_S
        until = anyio.current_time() + wait_s
        while True:
            # What a thread has taken must come back to us, or nobody would ever let go of it.
            with anyio.CancelScope(shield=True):
                descriptor = await to_thread.run_sync(self._try, chat)
            if descriptor is not None or anyio.current_time() >= until:
                return descriptor
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _try(self, chat: ChatId) -> int | None:
        path = self._folder / chat.user / f"chat-{chat.chat}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise StorageUnavailable(f"cannot write {path} ({exc.strerror}): free space") from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


def _let_go(descriptor: int) -> None:
    # Said, and not left to the close: a child that is just being started has the file open, too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
