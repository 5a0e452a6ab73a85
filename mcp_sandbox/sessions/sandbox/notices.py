"""Notices: sentences that an agent gets with its next result without having asked."""

from collections.abc import Sequence

from mcp_sandbox.models import Background, ChatId, ProcessRow

_MOST_OF_A_CHAT = 5
_MOST_CHATS = 1000
_MOST_NAMED = 8


class Notices:
    """The latest notices of each chat, until its next result takes them."""

    def __init__(self) -> None:
        self._pending: dict[ChatId, list[str]] = {}

    def add(self, chat: ChatId, text: str) -> None:
        """Keep a text until the chat's agent takes it."""
        untold = [*self._pending.pop(chat, []), text][-_MOST_OF_A_CHAT:]
        if len(self._pending) >= _MOST_CHATS:
            del self._pending[next(iter(self._pending))]
        self._pending[chat] = untold

    def take(self, chat: ChatId) -> list[str]:
        """Return the chat's texts, and forget them."""
        return self._pending.pop(chat, [])


def say_state(row: ProcessRow) -> str:
    """Return how a process ended, or "running", in a few words."""
    if row.running:
        return "running"
    if row.out_of_memory:
        return "ran out of memory"
    words = {"timeout": "timed out", "stopped": "was stopped", "cancelled": "was cancelled"}
    if row.why in words:
        return words[row.why]
    return f"was killed by {row.signal}" if row.signal else f"ended with exit code {row.exit_code}"


def describe_end(row: ProcessRow) -> str:
    """Return the notice that a background process has ended."""
    return (
        f"{row.id} ({row.command}) {say_state(row)} after {row.seconds:.0f} s; process action=wait "
        f"id={row.id} shows its last output"
    )


def name_background(background: Background) -> Sequence[str]:
    """Return names of what runs in the background, and how much else does."""
    named = [
        f"{each.id} ({each.command})"
        if each.id
        else f"{each.command or 'a process'} (pid {each.pid})"
        for each in background.processes[:_MOST_NAMED]
    ]
    more = background.total - len(named)
    return [*named, f"{more} more"] if more > 0 else named


def describe_lost(names: Sequence[str]) -> str:
    """Return a sentence on what was ended in the background, "" if nothing was."""
    return f" Ended in the background: {', '.join(names)}." if names else ""


def describe_successor(cause: str, ran: Sequence[str]) -> str:
    """Return the notice that another sandbox is open than at the last call."""
    return (
        f"The sandbox had ended since the last call{cause and f': {cause}'}; this is a new one, so "
        f"count on nothing that was in /tmp.{describe_lost(ran)}"
    )
