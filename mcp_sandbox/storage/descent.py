"""Which backup of a chat its files go on from: by descent, not by time. Pure: values in and out.

A save names its last 64 ancestors; with them it is a *line*. Lines part where files are changed in
two places, as on a machine and on a copy of its data root. A chat's record has, under "backup":

    saves   keys of saves that the files here hold, whose ancestors are theirs too
    begun   keys noted `by` a server before their uploads began: what is listed of them came about

1. Files here give way only to a backup that is not of their line, and whose line has more saves
   since the two parted. What is not saved counts for nothing, and is saved first, as their line.
2. Where nothing in common is known, as in a store that lists late or is another one, they stay.
3. Nothing is merged, but by a person: what a person restores goes on from both lines.
4. Backups without ancestors, of an earlier version, count by their epoch, and where servers share
   chats all do: it is that of the lease. Descent decides within an epoch.
5. Of its own line a server removes all but the newest, and spares the newest of others. A line that
   nobody has continued for long goes as a whole, its last save last.

Keys grow along a line, whatever the clocks say.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any, NamedTuple

from mcp_sandbox.storage.backups import KEY_TIME, MOST_ANCESTORS, Backup

# More there are only after as many kills.
_MOST_BEGUN = 8

Keys = Set[str]
Note = Mapping[str, Any]


class Own(NamedTuple):
    """The saves that files here come from, as far as they are known, and those begun."""

    line: Keys
    begun: Keys
    epoch: int

    @property
    def ancestors(self) -> tuple[str, ...]:
        """Return those of the next save, the last first."""
        return tuple(sorted(self.line | self.begun, reverse=True)[:MOST_ANCESTORS])


def read_own(kept: Note, server: str, found: Sequence[Backup]) -> Own:
    """Return what a record says, by what is listed. A copy may lack what another server began."""
    saves, epoch, begun = {*kept.get("saves", ())}, kept.get("epoch", 0), set[str]()
    if kept.get("by") == server:
        begun = {*kept.get("begun", ())}
    lines = {each.key: _line(each, found) for each in found}
    if "saves" not in kept and "saved" in kept:
        at = f"-{datetime.fromtimestamp(kept['saved'], UTC).strftime(KEY_TIME)}-"
        saves = {key for line in lines.values() for key in line if at in key}
    older = {each.key for each in found if each.ancestors is None and each.epoch <= epoch}
    known = (lines[key] for key in lines.keys() & (saves | begun))
    return Own(saves.union(older, *known), begun, epoch)


def note_begun(kept: Note, key: str, server: str) -> Note:
    """Return what a record says before the upload of a save."""
    begun = [*(kept.get("begun", ()) if kept.get("by") == server else ()), key]
    return {**kept, "begun": begun[-_MOST_BEGUN:], "by": server}


def note_saved(kept: Note, saved: Backup) -> Note:
    """Return what a record says after it; others may have saved meanwhile."""
    held = {saved.key, *(saved.ancestors or ())}
    saves, begun = ([k for k in kept.get(name, ()) if k not in held] for name in ("saves", "begun"))
    return {**kept, "saves": [saved.key, *saves], "begun": begun}


def note_taken(
    kept: Note, own: Own, found: Sequence[Backup], taken: Backup | None, *, here: bool, chosen: bool
) -> Note:
    """Return what a record says where a chat goes on from a backup, or from files `here` or none.

    `chosen`: by a person, so that its own line and those of what came from that backup end in it.
    """
    last = [*filter(None, [max(own.line, default="")])]
    if taken and chosen:
        ended = [each.key for each in _tips(found) if taken.key in (each.ancestors or ())]
        return {**kept, "saves": [taken.key, *last, *ended], "begun": sorted(own.begun)}
    if taken or not here:
        return {**kept, "saves": [taken.key] if taken else [], "begun": []}
    return {"saves": last, **kept, "begun": sorted(own.begun)}


def choose(
    own: Own, found: Sequence[Backup], *, here: bool, leased: bool = False
) -> Sequence[Backup]:
    """Return what to go on from, the first that is sound; nothing where the files `here` stay.

    `found`: the newest first. `leased`: epochs are those of leases.
    """

    def lead(tip: Backup, line: Keys, epoch: int) -> float:
        if tip.epoch != epoch and (leased or (epoch and tip.ancestors is None)):
            return math.copysign(math.inf, tip.epoch - epoch)
        return _count_lead(_line(tip, found), line)

    tips = [tip for tip, _ in list_others(own, found)]
    leads = {(lead(tip, own.line, own.epoch), tip.key): tip for tip in tips}
    best = leads[max(leads)] if leads and max(leads)[0] > 0 else None
    if here:
        line = _line(best, found) - own.line if best else set[str]()
        return [each for each in found if each.key in line]
    for each in [] if best else [each for each in found if each.key in own.line][:1] or tips:
        if not best or lead(each, _line(best, found), best.epoch) > 0:
            best = each
    line = _line(best, found) if best else set[str]()
    return sorted(found, key=lambda each: each.key not in line)


def list_others(own: Own, found: Sequence[Backup]) -> Sequence[tuple[Backup, str]]:
    """Return the last saves of other lines, and where these have parted, "" if that is unknown."""
    tips = (each for each in _tips(found) if each.key not in {*own.line, *own.begun})
    return [(tip, part(_line(tip, found), own.line)) for tip in tips]


def part(ours: Keys, theirs: Keys) -> str:
    """Return the last save that two lines have in common, "" if none is known."""
    return max(ours & theirs, default="")


def list_old(
    own: Keys, found: Sequence[Backup], listed: Iterable[str], unused: Keys, keep: int
) -> Sequence[str]:
    """Return which of the keys that are `listed` to remove by rule 5, in this order.

    `unused`: those of long ago. With `keep` 0 all of the own line goes that no other has.
    """
    tips, known = [each for each in _tips(found) if each.key not in own], sorted(listed)
    live = [_line(each, found) for each in tips if each.key not in unused]
    dead = set[str]().union(*(_line(each, found) for each in tips if each.key in unused))
    if keep:
        spared = [[key for key in known if key in line][-keep:] for line in (own, *live)]
        gone = {*own}.difference(*spared) | dead.difference(own, *live)
    else:
        gone = {*own, *dead}.difference(*live)
    return [key for key in known if key in gone]


def _count_lead(theirs: Keys, ours: Keys) -> int:
    """Return how many more saves a line has since it parted; 0 if it is not known where."""
    parted = part(theirs, ours)
    counts = [sum(key > parted for key in line) for line in (theirs - ours, ours - theirs)]
    return counts[0] - counts[1] if parted else 0


def _line(backup: Backup, found: Sequence[Backup]) -> Keys:
    if backup.ancestors is not None:
        return {backup.key, *backup.ancestors}
    return {each.key for each in found if each.ancestors is None and each.key <= backup.key}


def _tips(found: Sequence[Backup]) -> list[Backup]:
    """Return the last saves of lines."""
    older = set[str]().union(*(_line(each, found) - {each.key} for each in found))
    return [each for each in found if each.key not in older]
