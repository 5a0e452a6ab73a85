"""What is remembered of a chat, and the lock by which one server at a time changes its sandbox.

A record says what the chat is bound to and when it was used last. What files a chat has is read
from the directories, what runs from the backend: a record that is lost costs the chat neither.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import BackendName, ChatId, SandboxId
from mcp_sandbox.workspace.retention import Moment

__all__ = ["ChatRecord", "ChatRecords", "Clock", "Ledger", "system_clock"]

logger = logging.getLogger(__name__)

Clock = Callable[[], Moment]


@dataclass(frozen=True)
class ChatRecord:
    """One chat. Times are seconds since the epoch; `spec` is the digest of the sandbox's making.

    `backend` is None where it is not known any more. `sections` is what other rooms keep with a
    chat, by their names; `further` are fields of a newer version, which stay as they are.
    """

    chat: ChatId
    backend: BackendName | None
    created_s: float
    used_s: float
    sandbox_id: SandboxId | None = None
    image: str | None = None
    spec: str = ""
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ChatRecords(Protocol):
    """Records by chat. Several processes may use the same ones.

    Every method may raise StorageUnavailable: the records cannot be read or written now.
    """

    async def get(self, chat: ChatId) -> ChatRecord | None:
        """The chat's record. Call it while you hold the chat: one that is damaged is made anew."""

    async def put(self, record: ChatRecord) -> None:
        """Write a record, in place of the chat's earlier one. Call it while you hold the chat."""

    async def touch(self, used: Mapping[ChatId, float]) -> None:
        """Note when chats were last used; an earlier time than the known one changes nothing."""

    async def list(self) -> Sequence[ChatRecord]:
        """Every record, the last used first."""

    async def remove(self, chat: ChatId) -> None:
        """Forget a chat; an unknown one is not an error."""

    def hold(self, chat: ChatId, *, at_once: bool = False) -> AbstractAsyncContextManager[bool]:
        """Have the chat for this server alone; the lock dies with its process.

        A task that has it already would wait for itself. `at_once`: False where another has it.

        Raises:
            BackendUnavailable: another server has had it for too long.
        """


def system_clock() -> Moment:
    """Now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


class Ledger:
    """The times of use that one process knows of. What cannot be written is tried again."""

    def __init__(self, records: ChatRecords, clock: Clock = system_clock) -> None:
        self.records = records
        self.clock = clock
        self._unwritten: dict[ChatId, float] = {}
        self._used_at: dict[ChatId, float] = {}
        self._failing = False

    def used(self, chat: ChatId) -> None:
        """It is used just now. Costs nothing: it is written later."""
        now = self.clock()
        self._used_at[chat], self._unwritten[chat] = now.steady_s, now.wall_s

    def idle_s(self, chat: ChatId) -> float:
        """How long ago this process used the chat last; 0 from when it is asked for first."""
        now_s = self.clock().steady_s
        return now_s - self._used_at.setdefault(chat, now_s)

    def times(self, chat: ChatId, known: ChatRecord | None) -> tuple[datetime, datetime]:
        """When it began and was used last, in UTC; now, where that is unknown."""
        created_s = known.created_s if known else self.clock().wall_s
        used_s = self._unwritten.get(chat) or (known.used_s if known else created_s)
        return datetime.fromtimestamp(created_s, UTC), datetime.fromtimestamp(used_s, UTC)

    def forget(self, chat: ChatId) -> None:
        """It exists no longer."""
        self._unwritten.pop(chat, None)
        self._used_at.pop(chat, None)

    async def write(self) -> None:
        """Write the times of use."""
        used, self._unwritten = self._unwritten, {}
        written = False
        try:
            await self.records.touch(used)
            written, self._failing = True, False
        except StorageUnavailable as exc:
            # Once: it is tried again every few seconds.
            if not self._failing:
                logger.warning("%s; trying again until it works", exc)
            self._failing = True
        finally:
            if not written:
                self._unwritten = {**used, **self._unwritten}
