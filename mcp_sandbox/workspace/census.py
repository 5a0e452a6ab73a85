"""Which chats have files, and how much the chats of one user have together. Blocking."""

import math
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
    good_until: float


class UserTotals:
    """What each user's chats occupy, from what was last measured of each of them.

    An open chat is measured all the time, so only figures of the others grow old.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._figures: dict[ChatId, _Figure] = {}

    def measure(
        self, chat: ChatId, siblings: Iterable[ChatId], measure: Callable[[ChatId], Usage]
    ) -> tuple[Usage, int]:
        """The usage of a chat, and the bytes of its user's other chats.

        Of these, those are measured that are not known, or else the one with the oldest figure.
        """
        own = self._take(chat, measure)
        others = [sibling for sibling in siblings if sibling != chat]
        for known in list(self._figures):
            if known.user == chat.user and known not in (chat, *others):
                self._figures.pop(known, None)
        unknown = [one for one in others if one not in self._figures]
        for sibling in unknown or self._oldest(others):
            self._take(sibling, measure)
        figures = (self._figures.get(one) for one in others)
        return own, sum(figure.allocated_bytes for figure in figures if figure)

    def _oldest(self, chats: Iterable[ChatId]) -> list[ChatId]:
        times = [(figure.good_until, one) for one in chats if (figure := self._figures.get(one))]
        until, oldest = min(times, key=lambda time_: time_[0], default=(math.inf, None))
        return [oldest] if oldest and until < self._clock() else []

    def _take(self, chat: ChatId, measure: Callable[[ChatId], Usage]) -> Usage:
        started, known = self._clock(), self._figures.get(chat)
        usage = measure(chat)
        ended = self._clock()
        good_for_s = max(_GOOD_FOR_S, _GOOD_FOR_PER_COST * (ended - started))
        # Where there was too much to count, it is no less than what was counted before.
        least = known.allocated_bytes if known and not usage.complete else 0
        self._figures[chat] = _Figure(max(usage.allocated_bytes, least), ended + good_for_s)
        return usage
