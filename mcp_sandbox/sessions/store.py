"""What is remembered of chats between runs of a server.

A store is a cache: what data exists is read from the directories, what runs from the backend. So
a store that is lost costs the times of last use, and nothing else; no call waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from mcp_sandbox.models import BackendName, ChatId, SandboxId, SessionState


@dataclass(frozen=True)
class SessionRecord:
    """One chat. Times are in UTC; `spec` is the digest of what its sandbox was made from.

    state: "warm" has files and no sandbox, "terminated" has its files in the trash.
    """

    id: str
    chat: ChatId
    backend: BackendName
    sandbox_id: SandboxId | None
    state: SessionState
    created_at: datetime
    last_used_at: datetime
    image: str | None
    spec: str


class SessionStore(Protocol):
    """Records by chat. Several processes may use one store.

    Every method may raise StorageUnavailable: the store cannot be read or written now; what was
    written before is still there.
    """

    async def put(self, record: SessionRecord) -> None:
        """Write a record, in place of the chat's earlier one.

        Of two births the earlier counts, of two uses the later: another process may know better.
        """
        ...

    async def touch(self, used: Mapping[ChatId, datetime]) -> None:
        """Note when chats were last used; an earlier time than the known one changes nothing."""
        ...

    async def remove(self, chat: ChatId) -> None:
        """Forget a chat; an unknown one is not an error."""
        ...

    async def all(self) -> Sequence[SessionRecord]:
        """Every record, the last used first."""
        ...

    async def aclose(self) -> None: ...
