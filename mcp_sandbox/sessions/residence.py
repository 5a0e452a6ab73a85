"""Remembers on which backend a chat lives, so that it never changes unnoticed, and in what.

    {data root}/sandbox/residence/{user}/chat-{chat}       the name of the backend
                                        sandbox-{chat}    the sandbox that was opened last

A lost file is no harm: the next sandbox writes it again.
"""

import logging
from pathlib import Path

from anyio import to_thread

from mcp_sandbox.errors import BackendUnavailable, StorageUnavailable
from mcp_sandbox.models import BackendName, ChatId, SandboxId

logger = logging.getLogger(__name__)


class Residence:
    """The residences of all chats of one data root."""

    def __init__(self, data_root: Path, *, may_move: bool) -> None:
        self._folder = data_root / "sandbox" / "residence"
        self._may_move = may_move

    async def settle(self, chat: ChatId, backend: BackendName) -> bool:
        """Record that the chat lives on this backend; whether it is the chat's first.

        Raises:
            BackendUnavailable: it lives on another one, and nobody said that it should move.
            StorageUnavailable: the record cannot be written.
        """
        return await to_thread.run_sync(self._settle, chat, backend)

    async def sandbox(self, chat: ChatId) -> SandboxId | None:
        """The sandbox that was remembered last; it may be gone."""
        return await to_thread.run_sync(self._sandbox, chat)

    async def remember(self, chat: ChatId, sandbox_id: SandboxId) -> None:
        """Record which sandbox the chat has; where that cannot be written, its labels tell."""
        await to_thread.run_sync(self._remember, chat, sandbox_id)

    async def forget(self, chat: ChatId) -> None:
        """The chat has no files any more: if it comes back, it is a new one."""
        await to_thread.run_sync(self._forget, chat)

    def _forget(self, chat: ChatId) -> None:
        for path in (self._note(chat), self._record(chat)):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                # The chat only stays bound to its backend.
                logger.warning("%s cannot be removed: %s", path, exc)

    def _sandbox(self, chat: ChatId) -> SandboxId | None:
        try:
            return SandboxId(self._note(chat).read_text())
        except (OSError, ValueError):
            return None

    def _remember(self, chat: ChatId, sandbox_id: SandboxId) -> None:
        note = self._note(chat)
        fresh = note.with_name(f".{sandbox_id}")
        try:
            fresh.write_text(sandbox_id)
            fresh.rename(note)
        except OSError as exc:
            logger.warning("chat %s: its sandbox could not be written down: %s", chat, exc)

    def _note(self, chat: ChatId) -> Path:
        return self._folder / chat.user / f"sandbox-{chat.chat}"

    def _record(self, chat: ChatId) -> Path:
        return self._folder / chat.user / f"chat-{chat.chat}"

    def _settle(self, chat: ChatId, backend: BackendName) -> bool:
        record = self._record(chat)
        try:
            before = record.read_text() if record.exists() else ""
            if before not in ("", backend) and not self._may_move:
                raise BackendUnavailable(
                    f"chat {chat} lives on {before}, which does not work now: repair it (see "
                    f"`mcp-sandbox doctor`), or move the chat with `--backend {backend}`; its "
                    "files stay the same, its isolation would change"
                )
            if before != backend:
                record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                record.write_text(backend)
        except OSError as exc:
            raise StorageUnavailable(f"the data directory cannot be written: {exc}") from exc
        return before == ""
