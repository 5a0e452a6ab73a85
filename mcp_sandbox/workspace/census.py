"""Which chats have files, and how much the chats of one user have together. Blocking."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.beneath import open_directory
from mcp_sandbox.workspace.usage import Usage

_PREFIX = "chat-"
_GOOD_FOR_S = 30.0
_GOOD_FOR_PER_COST = 20


def chats(sandbox: int, user: str | None = None) -> list[ChatId]:
    """The chats that have a workspace, of all users or of one; what else lies there is not ours."""
    with ExitStack() as stack:
        root = open_directory(sandbox, b"workspace")
        stack.callback(os.close, root)
        users = _directories(root) if user is None else [user]
        return [chat for name in users for chat in _chats_of(root, name)]


def _chats_of(root: int, user: str) -> Iterable[ChatId]:
    try:
        directory = open_directory(root, user.encode())
    except OSError:
        return
    try:
        names = _directories(directory)
    finally:
        os.close(directory)
    for name in names:
        if name.startswith(_PREFIX):
            with suppress(InvalidArgument):
                yield ChatId(user, name.removeprefix(_PREFIX))


def _directories(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


@dataclass(frozen=True)
class _Figure:
    allocated_bytes: int
    taken_at: float
    good_for_s: float


class UserTotals:
    """What each user's chats occupy, from what was last measured of each of them.

    An open chat is measured all the time, so only figures of the others grow old.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._figures: dict[ChatId, _Figure] = {}

    def note(self, chat: ChatId, usage: Usage, cost_s: float) -> None:
        """Remember a measurement that took `cost_s`."""
        good_for_s = max(_GOOD_FOR_S, _GOOD_FOR_PER_COST * cost_s)
        known = self._figures.get(chat)
        # Where there was too much to count, it is no less than what was counted before.
        least = known.allocated_bytes if known and not usage.complete else 0
        size = max(usage.allocated_bytes, least)
        self._figures[chat] = _Figure(size, self._clock(), good_for_s)

    def others(
        self, chat: ChatId, siblings: Iterable[ChatId], measure: Callable[[ChatId], Usage]
    ) -> int:
        """The bytes of the user's other chats; those not known are measured, and one old one."""
        others = [sibling for sibling in siblings if sibling != chat]
        for gone in [c for c in list(self._figures) if c.user == chat.user and c not in others]:
            if gone != chat:
                self._figures.pop(gone, None)
        for sibling in [one for one in others if one not in self._figures]:
            self._measure(sibling, measure)
        oldest = min(others, key=self._good_until, default=None)
        if oldest is not None and self._good_until(oldest) < self._clock():
            self._measure(oldest, measure)
        return sum(self._figures[one].allocated_bytes for one in others if one in self._figures)

    def _good_until(self, chat: ChatId) -> float:
        figure = self._figures.get(chat)
        return figure.taken_at + figure.good_for_s if figure else self._clock()

    def _measure(self, chat: ChatId, measure: Callable[[ChatId], Usage]) -> None:
        started = self._clock()
        self.note(chat, measure(chat), self._clock() - started)
