"""What the operator sees of chats: pure, from what the manager found."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import BackendName, ChatId, SandboxInfo, SessionState, SessionStatus


@dataclass(frozen=True)
class Use:
    """What this server does with a chat now; `starting`: its sandbox is just being made.

    `age_s`: how long ago its sandbox was started; `dead`: it was found to have ended; `can_pause`:
    that would save something, and it is not paused yet.
    """

    starting: bool = False
    open: bool = False
    can_pause: bool = False
    calls: int = 0
    dead: bool = False
    age_s: float = 0.0
    background: int = 0
    image: str = ""


@dataclass(frozen=True)
class Times:
    """When a chat began and when it was last used, in UTC."""

    created_at: datetime
    last_used_at: datetime


def session_id(chat: ChatId) -> str:
    """A short name of a chat that is the same in every server."""
    return hashlib.sha256(str(chat).encode()).hexdigest()[:12]


def chat_of(labels: Mapping[str, str]) -> ChatId | None:
    """The chat that a sandbox's labels name, if they do."""
    try:
        return ChatId(labels["user"], labels["chat"])
    except (KeyError, InvalidArgument):
        return None


def statuses(
    times: Mapping[ChatId, Times],
    running: Iterable[SandboxInfo],
    uses: Mapping[ChatId, Use],
    backend: BackendName,
) -> list[SessionStatus]:
    """One row for each chat of `times`, the last used first."""
    sandboxes = {chat_of(info.labels): info for info in running}
    rows = [
        _row(chat, when, sandboxes.get(chat), uses.get(chat, Use()), backend)
        for chat, when in times.items()
    ]
    return sorted(rows, key=lambda row: row.last_used_at, reverse=True)


def _row(
    chat: ChatId, when: Times, sandbox: SandboxInfo | None, use: Use, backend: BackendName
) -> SessionStatus:
    state: SessionState = "warm"
    if sandbox is not None:
        state = sandbox.state
    elif use.starting:
        state = "starting"
    return SessionStatus(
        id=session_id(chat),
        chat=chat,
        state=state,
        backend=backend,
        sandbox_id=sandbox.id if sandbox else None,
        created_at=when.created_at,
        last_used_at=when.last_used_at,
        image=use.image,
        spec=sandbox.labels.get("spec", "") if sandbox else "",
        busy=use.calls,
        background=use.background,
    )
