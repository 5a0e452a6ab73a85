"""By descent no older copy beats a newer save, and nothing that was saved is in no backup."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict

from mcp_sandbox.models import ChatId
from mcp_sandbox.storage import descent
from mcp_sandbox.storage.backups import MOST_ANCESTORS, Backup, NewSave

CHAT = ChatId("ada", "1")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SIZES: dict[str, Any] = {"size": 1, "files_bytes": 1, "entries": 1, "sha256": "", "version": "1"}


def save(
    *after: Backup, epoch: int = 1, server: str = "a", at: datetime = NOON, old: bool = False
) -> Backup:
    """A save whose files come from others; an `old` one does not say so."""
    line = sorted({key for each in after for key in each.line}, reverse=True)
    new = asdict(NewSave(epoch, at, tuple(line)[:MOST_ANCESTORS], server))
    if old:
        new |= {"ancestors": None, "server": ""}
    return Backup(chat=CHAT, quiet=True, **SIZES, **new)


def chain(count: int, *after: Backup, **given: Any) -> list[Backup]:
    made: list[Backup] = []
    for _ in range(count):
        made.append(save(*made[-1:] or after, **given))
    return made


def listed(*backups: Backup | Sequence[Backup]) -> list[Backup]:
    flat = [one for each in backups for one in ([each] if isinstance(each, Backup) else each)]
    return sorted(flat, key=lambda each: each.key, reverse=True)


def note(*saves: Backup, epoch: int = 1, begun: Sequence[str] = (), by: str = "a") -> descent.Note:
    return {"saves": [each.key for each in saves], "begun": begun, "by": by, "epoch": epoch}


def taken(
    kept: descent.Note, found: Sequence[Backup], *, here: bool = True, leased: bool = False
) -> Backup | None:
    own = descent.read_own(kept, "a", found)
    return next(iter(descent.choose(own, found, here=here, leased=leased)), None)


def test_files_give_way_to_what_was_saved_from_them_elsewhere() -> None:
    first, *_ = ours = chain(3)
    newer = chain(2, ours[-1], server="b")
    assert taken(note(ours[-1]), listed(ours, newer)) == newer[-1]
    # Also where their own last save was thinned there.
    assert taken(note(ours[-1]), listed(newer)) == newer[-1]
    assert taken(note(first), listed(newer[-1])) == newer[-1]
    assert taken(note(newer[-1]), listed(ours, newer)) is None


def test_they_stay_where_nothing_in_common_is_known() -> None:
    ours, others = chain(3), chain(9, server="b", at=NOON + timedelta(days=1), epoch=9)
    for found in ([], listed(others), listed(others, ours[:2])):
        assert taken(note(ours[-1]), found) is None
    long = chain(MOST_ANCESTORS + 1, ours[-1], server="b")
    assert taken(note(ours[-1]), listed(long[-1])) is None
    assert taken({}, listed(others)) is None


@pytest.mark.parametrize(("ours", "theirs"), [(0, 1), (1, 1), (1, 2), (2, 1), (3, 3), (5, 6)])
def test_of_two_lines_the_one_with_more_saves_since_they_parted_goes_on(
    ours: int, theirs: int
) -> None:
    common = chain(3)
    mine = chain(ours, common[-1], at=NOON + timedelta(hours=1))
    others = chain(theirs, common[-1], server="b")
    found = listed(common, mine, others)
    tip = [*common, *mine][-1]
    assert taken(note(tip), found) == (others[-1] if theirs > ours else None)
    own = descent.read_own(note(tip), "a", found)
    assert descent.list_others(own, found) == [(others[-1], common[-1].key)]


def test_a_save_that_was_begun_counts_if_it_is_listed_and_was_begun_here() -> None:
    base = save()
    begun = save(base)
    kept = note(base, begun=["lost", begun.key])
    assert taken(kept, listed(base, begun)) is None
    own = descent.read_own(kept, "a", listed(base, begun))
    assert own.ancestors == ("lost", begun.key, base.key)
    # It has what was written after the root was copied, which the copy lacks.
    assert taken({**kept, "by": "b"}, listed(base, begun)) == begun
    # What never came about is no save since the two have parted.
    other = save(base, server="b")
    assert taken(note(base, begun=["lost"]), listed(base, other)) == other


def test_what_another_server_began_stays_its_own_where_files_stay() -> None:
    base = save()
    kept, found = note(base, begun=["begun"], by="b"), [base]
    own = descent.read_own(kept, "a", found)
    stays = descent.note_taken(kept, own, found, None, here=True, chosen=False)
    assert (stays["saves"], stays["begun"]) == ([base.key], [])


def test_what_piles_up_after_kills_is_bounded() -> None:
    kept: descent.Note = {}
    for number in range(100):
        kept = descent.note_begun(kept, f"{number}", "a")
    assert kept["begun"] == [f"{number}" for number in range(92, 100)]
    saved = save().model_copy(update={"ancestors": tuple(kept["begun"])})
    assert descent.note_saved(kept, saved) == {"saves": [saved.key], "begun": [], "by": "a"}


def test_what_another_process_has_saved_meanwhile_stays_noted() -> None:
    base, other = save(), save()
    kept = descent.note_begun(descent.note_saved(note(base), other), "later", "a")
    saved = save(base)
    assert descent.note_saved(kept, saved) == {
        **kept, "saves": [saved.key, other.key], "begun": ["later"],
    }  # fmt: skip


def test_keys_grow_along_a_line_whatever_the_clock_says() -> None:
    for back in (timedelta(), timedelta(microseconds=1), timedelta(days=1)):
        line = [save(at=NOON)]
        for number in range(5):
            line.append(save(line[-1], at=NOON - number * back))
        assert [each.key for each in line] == sorted(each.key for each in line)
        assert line[-1].saved_at == NOON - 4 * back
    strange = save().model_copy(update={"key": "1-99991231T235959.999999-x"})
    assert save(strange).key
    assert save(strange.model_copy(update={"key": "a-b-c"})).key


@pytest.mark.parametrize("here", [True, False])
def test_earlier_versions_count_by_epochs(here: bool) -> None:
    times = [NOON + timedelta(seconds=each) for each in range(3)]
    old = [save(epoch=3 + 2 * (at == times[2]), old=True, at=at) for at in times]
    by_time = {"saved": old[1].saved_at.timestamp(), "epoch": 3}
    assert taken(by_time, listed(old), here=here) == old[2]
    assert taken(by_time, listed(old[:2]), here=here) == (None if here else listed(old[:2])[0])
    assert taken({**by_time, "epoch": 5}, listed(old)) is None
    newer = save(old[1], epoch=9)
    assert taken(by_time, listed(old[:2], newer), here=here) == newer


def test_a_record_without_an_id_takes_the_backup_of_its_time() -> None:
    old = [save(epoch=3, old=True, at=NOON + timedelta(seconds=each)) for each in range(3)]
    line = chain(2, *old, epoch=7, server="b", at=NOON + timedelta(days=1))
    kept = {"saved": old[1].saved_at.timestamp(), "epoch": 3}
    # It was thinned there, and its ancestors too.
    assert taken(kept, listed(line)) == line[-1]
    assert taken({**kept, "saved": 5.0}, listed(line)) is None
    assert descent.note_taken(
        kept, descent.read_own(kept, "a", old[:2]), old[:2], None, here=True, chosen=False
    )["saves"] == [max(each.key for each in old[:2])]


def test_epochs_of_leases_decide_between_servers_and_descent_within_one() -> None:
    base = save(epoch=3)
    ahead, stale = save(base, epoch=5, server="b"), chain(4, base, epoch=2, server="c")
    kept, alone = note(base, epoch=3), save(epoch=4)
    assert taken(kept, listed(base, ahead, stale), leased=True) == ahead
    assert taken(kept, listed(base, alone), leased=True) == alone
    assert taken(kept, listed(base, stale), leased=True) is None
    assert taken(kept, listed(base, save(base, epoch=3)), leased=True) is not None
    assert taken({"epoch": 0}, listed(base), leased=True) == base


def test_without_files_the_own_line_is_taken_or_the_longer_one() -> None:
    common = chain(2)
    mine, others = chain(1, common[-1]), chain(2, common[-1], server="b")
    assert taken(note(mine[-1]), listed(common, mine), here=False) == mine[-1]
    assert taken(note(mine[-1]), listed(common, mine, others), here=False) == others[-1]
    assert taken({}, listed(common, mine, others), here=False) == others[-1]
    late = chain(1, common[-1], at=NOON + timedelta(days=1), epoch=9)
    assert taken({}, listed(common, late, others), here=False) == others[-1]
    # A store that lists late has an older one yet.
    assert taken(note(mine[-1]), listed(common), here=False) == common[-1]
    assert taken(note(mine[-1]), [], here=False) is None


def test_what_is_damaged_is_followed_by_what_came_before_it() -> None:
    common = chain(2)
    others, late = chain(2, common[-1], server="b"), chain(1, common[0], epoch=9)
    found = listed(common, others, late)
    own = descent.read_own(note(common[-1]), "a", found)
    assert descent.choose(own, found, here=True) == [*reversed(others)]
    nothing = descent.read_own({}, "a", found)
    assert descent.choose(nothing, found, here=False) == [
        *reversed(others), *reversed(common), *late,
    ]  # fmt: skip


def test_what_a_person_restores_ends_the_lines_that_came_from_it() -> None:
    common = chain(2)
    mine, others = chain(3, common[-1]), chain(1, common[-1], server="b")
    apart, found = chain(1, server="c"), listed(common, mine, others)
    for chosen in (common[0], others[-1], mine[0]):
        own = descent.read_own(note(mine[-1]), "a", [*found, *apart])
        kept = descent.note_taken(
            note(mine[-1]), own, [*found, *apart], chosen, here=True, chosen=True
        )
        after = listed(found, apart)
        assert taken(kept, after) is None
        ends = {each.key for each, _ in descent.list_others(
            descent.read_own(kept, "a", after), after
        )}  # fmt: skip
        assert ends == {apart[-1].key} | ({others[-1].key} if chosen == mine[0] else set())


def remaining(
    own: Backup | None, found: Sequence[Backup], *, keep: int, unused: Sequence[Backup] = ()
) -> set[str]:
    kept = note(own) if own else {}
    line, keys = descent.read_own(kept, "a", found).line, [each.key for each in found]
    gone = descent.list_old(line, found, keys, {each.key for each in unused}, keep)
    assert gone == sorted(gone)
    return {*keys} - {*gone}


def keys(*backups: Backup) -> set[str]:
    return {each.key for each in backups}


def test_a_server_thins_its_own_line_and_spares_the_newest_of_others() -> None:
    common = chain(4)
    mine, others = chain(6, common[-1]), chain(1, common[-1], server="b")
    found = listed(common, mine, others)
    assert remaining(mine[-1], found, keep=2) == keys(*mine[-2:], others[-1], common[-1])
    assert remaining(mine[-1], listed(common, mine), keep=3) == keys(*mine[-3:])
    assert remaining(None, found, keep=1) == keys(*common, *mine, *others)
    assert remaining(mine[-1], listed(mine, chain(9, server="c")), keep=1) >= keys(mine[-1])


def test_a_line_that_nobody_continues_goes_its_last_save_last() -> None:
    common = chain(2)
    mine, others = chain(2, common[-1]), chain(3, common[-1], server="b")
    found = listed(common, mine, others)
    everything = {each.key for each in (*common, *mine)}
    assert remaining(mine[-1], found, keep=9, unused=[*common, *others]) == everything
    # One that goes on is not unused, however old it began.
    assert remaining(mine[-1], found, keep=9, unused=[*common, *others[:-1]]) == {
        each.key for each in found
    }


def test_the_retention_of_a_copy_removes_nothing_of_the_line_that_lives() -> None:
    common = chain(3)
    lives = chain(2, common[-1], server="b")
    found = listed(common, lives)
    assert remaining(common[-1], found, keep=0) == {each.key for each in found}
    copy = chain(2, common[-1])
    assert remaining(copy[-1], listed(found, copy), keep=0) == {each.key for each in found}
    assert remaining(lives[-1], found, keep=0) == set()


class ManifestOf020(BaseModel):
    """What version 0.2.0 read a manifest as."""

    model_config = ConfigDict(frozen=True, strict=True)

    chat: ChatId
    key: str
    epoch: int
    saved_at: AwareDatetime
    size: int
    files_bytes: int
    entries: int
    quiet: bool
    sha256: str
    version: str


def test_manifests_are_read_by_the_version_before_and_theirs_here() -> None:
    made = chain(MOST_ANCESTORS + 5)[-1]
    text = made.model_dump_json()
    assert len(text) < 16 << 10
    older = ManifestOf020.model_validate_json(text)
    assert (older.key, older.epoch, older.saved_at) == (made.key, made.epoch, made.saved_at)
    back = Backup.model_validate_json(older.model_dump_json())
    assert (back.ancestors, back.server) == (None, "")
    assert Backup.model_validate_json(text) == made


# Random histories: two servers, one a copy of the other, that are killed at any step.


class KilledError(Exception):
    """The server ended here."""


@dataclass
class Root:
    """A data root: its record, and which writes its files hold."""

    name: str
    kept: Mapping[str, Any] = field(default_factory=dict)
    files: frozenset[int] | None = None
    epoch: int = 1


@dataclass
class World:
    chance: random.Random
    store: dict[str, tuple[Backup, frozenset[int]]] = field(default_factory=dict)
    safe: set[int] = field(default_factory=set)
    writes: int = 0
    names: int = 0
    roots: list[Root] = field(default_factory=lambda: [Root("a"), Root("b")])
    kills: bool = True

    def step(self) -> None:
        """Be killed now, or copied."""
        if self.kills and self.chance.random() < 0.03:
            raise KilledError
        if self.kills and self.chance.random() < 0.03:
            copy(self, self.chance.choice([0, 1]))

    def found(self) -> list[Backup]:
        """What the store lists, which may lack what was stored last."""
        every = listed([backup for backup, _ in self.store.values()])
        return every[1:] if self.kills and self.chance.random() < 0.05 else every

    def open(self, root: Root) -> None:
        found = self.found()
        own, here = descent.read_own(root.kept, root.name, found), root.files is not None
        take = descent.choose(own, found, here=here)
        if take and here and not root.kept.get("clean"):
            found = [self.save(root, found), *found]
            own = descent.read_own(root.kept, root.name, found)
        before = root.kept
        if take:
            assert root.files is None or root.files <= self.safe
            backup, files = self.store[take[0].key]
            parted = descent.part(backup.line, own.line) if here else backup.key
            root.kept = {**before, "saves": [parted] if parted else [], "begun": [], "clean": True}
            self.step()
            root.files = files
            self.step()
        first = take[0] if take else None
        kept = descent.note_taken(before, own, found, first, here=here, chosen=False)
        root.files = root.files or frozenset()
        root.kept = {**kept, "by": root.name, "clean": False, "epoch": root.epoch}

    def write(self, root: Root) -> None:
        self.open(root)
        assert root.files is not None
        self.step()
        self.writes += 1
        root.files |= {self.writes}

    def save(self, root: Root, found: Sequence[Backup] | None = None) -> Backup:
        assert root.files is not None
        found = self.found() if found is None else found
        own = descent.read_own(root.kept, root.name, found)
        at = NOON + timedelta(hours=self.chance.randint(-48, 48))
        new = NewSave(root.epoch, at, own.ancestors, root.name)
        root.kept = descent.note_begun(root.kept, new.key, root.name)
        self.step()
        if self.chance.random() < 0.3:
            # A call goes on meanwhile.
            self.writes += 1
            root.files |= {self.writes}
        backup = Backup(chat=CHAT, quiet=True, **SIZES, **asdict(new))
        self.store[new.key] = backup, root.files
        self.safe |= root.files
        self.step()
        root.kept = {**descent.note_saved(root.kept, backup), "clean": True}
        self.step()
        self.thin(root, [backup, *found], keep=2)
        return backup

    def thin(self, root: Root, found: Sequence[Backup], keep: int) -> None:
        line = descent.read_own(root.kept, root.name, found).line
        for key in descent.list_old(line, found, [*self.store], set(), keep):
            self.step()
            del self.store[key]

    def is_held(self, writes: frozenset[int] | set[int]) -> bool:
        return writes <= {one for _, files in self.store.values() for one in files}


def histories() -> Iterator[World]:
    for seed in range(200):
        yield World(random.Random(seed))


def test_in_no_history_is_a_saved_write_in_no_backup() -> None:
    parted = 0
    for world in histories():
        for _ in range(80):
            with suppress(KilledError):
                act(world)
            assert world.is_held(world.safe)
        parted += len({*world.store}) > 2
        # Then nothing is killed, and both are saved.
        world.kills = False
        for root in world.roots:
            world.write(root)
            world.save(root)
            assert root.files
            assert world.is_held(world.safe)
            assert world.is_held(root.files)
    assert parted > 20


def act(world: World) -> None:
    root, what = world.chance.choice(world.roots), world.chance.randrange(8)
    if what < 4 and root.files is not None:
        world.save(root)
    else:
        world.write(root)


def copy(world: World, target: int) -> None:
    """Put a copy of one root in the place of the other: what that had not saved is gone."""
    source = world.roots[1 - target]
    world.names += 1
    world.roots[target] = Root(f"copy{world.names}", source.kept, source.files)
