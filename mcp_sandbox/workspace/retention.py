"""Which files are due to go, and why. Pure: knows no clock and no disk.

The wall clock may be wrong, and jump. So it is read once for each thing, when that is first seen;
from then on ages are counted by a clock that cannot be set. Nothing is due before it was
watched for a while, nothing that is in use, and nothing that was used while it was watched.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from cronsim import CronSim

from mcp_sandbox.config.values import DAY_S
from mcp_sandbox.models import ChatId

K = TypeVar("K", bound=Hashable)

# A clock that was wrong when the machine started is put right by then.
WATCHED_S = 600.0
_UNITS = (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0))


@dataclass(frozen=True)
class Moment:
    """Now, by two clocks: seconds since the epoch, and since the machine started, asleep or not."""

    wall_s: float
    steady_s: float


@dataclass(frozen=True)
class Age:
    """How long ago something was used last, and for how much of that it was watched."""

    idle_s: float
    watched_s: float


@dataclass(frozen=True)
class DueChat:
    """A chat whose files are due to go."""

    chat: ChatId
    why: str


@dataclass(frozen=True)
class _Sighting:
    """First seen, with this stamp, `steady_s` after the machine's start; it was that old then."""

    stamp_s: float
    idle_s: float
    steady_s: float


class Ages(Generic[K]):
    """How long ago things were used, by their stamps and by what this process saw.

    `anchor` is a moment that this or an earlier process saw since the machine started: the wall
    clock cannot have gone on by more than the time that has passed since.
    """

    def __init__(self, anchor: Moment) -> None:
        self._anchor = anchor
        self._seen: dict[K, _Sighting] = {}

    def look(self, stamps: Mapping[K, float | None], now: Moment) -> Mapping[K, Age]:
        """Return ages, from wall-clock times of last use; None (unknown) counts from now on.

        A stamp from the future counts as now. What is not in `stamps` is forgotten.
        """
        self._seen = {key: self._sight(key, stamp, now) for key, stamp in stamps.items()}
        return {key: _age(sighting, now) for key, sighting in self._seen.items()}

    def _sight(self, key: K, stamp: float | None, now: Moment) -> _Sighting:
        before = self._seen.get(key)
        stamp_s = now.wall_s if stamp is None else stamp
        idle_s = max(0.0, limit_wall_clock(now, self._anchor).wall_s - stamp_s)
        if before is None:
            return _Sighting(stamp_s, idle_s, now.steady_s)
        if stamp is None or stamp == before.stamp_s:
            return before
        # It was used since the last look, whatever the clock said then.
        since_s = now.steady_s - before.steady_s
        return _Sighting(stamp, min(idle_s, since_s), now.steady_s)


def limit_wall_clock(now: Moment, anchor: Moment) -> Moment:
    """Return `now`, with no more on the wall clock than `anchor` and the time since allow."""
    passed_s = max(0.0, now.steady_s - anchor.steady_s)
    return Moment(min(now.wall_s, anchor.wall_s + passed_s), now.steady_s)


def _age(sighting: _Sighting, now: Moment) -> Age:
    counted_s = sighting.idle_s + now.steady_s - sighting.steady_s
    # A clock that was ahead at first, and was put right since, makes it younger.
    told_s = max(0.0, now.wall_s - sighting.stamp_s)
    return Age(min(counted_s, told_s), now.steady_s - sighting.steady_s)


def list_outdated(ages: Mapping[K, Age], keep_s: float, watched_s: float = WATCHED_S) -> list[K]:
    """Return keys unused for `keep_s` and watched for `watched_s`, the longest unused first."""
    found = [
        key for key, age in ages.items() if age.idle_s >= keep_s and age.watched_s >= watched_s
    ]
    return sorted(found, key=lambda key: (-ages[key].idle_s, str(key)))


def list_due_chats(
    ages: Mapping[ChatId, Age],
    *,
    keep_s: float,
    in_use: Collection[ChatId] = (),
    watched_s: float = WATCHED_S,
) -> list[DueChat]:
    """Return the chats unused for `keep_s` seconds; with 0, none."""
    if keep_s <= 0:
        return []
    kept = f"kept for {in_words(keep_s)} (workspace.retention)"
    found = [chat for chat in list_outdated(ages, keep_s, watched_s) if chat not in in_use]
    return [DueChat(chat, f"not used for {in_words(ages[chat].idle_s)}; {kept}") for chat in found]


def is_time(schedule: str, last: datetime, now: datetime) -> bool:
    """Return whether a cron expression was due after `last`, up to `now`; both local time."""
    return last < now and next(CronSim(schedule, last)) <= now


def in_words(seconds: float) -> str:
    """Return a duration for a message: in its largest unit, rounded down."""
    for name, unit_s in _UNITS:
        if seconds >= unit_s:
            count = int(seconds // unit_s)
            return f"{count} {name}" if count != 1 else f"1 {name[:-1]}"
    return f"{seconds:.0f} s"
