"""The installed skills of a user, and how they differ from what was installed."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mcp_sandbox.errors import AlreadyExists, SourceUnavailable, UnknownSkill, UnusableSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.contents import set_digest
from mcp_sandbox.skills.supply import lock
from mcp_sandbox.skills.supply.folder import read_folder
from mcp_sandbox.skills.supply.lock import Drift, Entry, Version
from mcp_sandbox.skills.supply.staging import Plan, Staging
from mcp_sandbox.skills.supply.tree import Tree, documents, show


@dataclass(frozen=True)
class State:
    """A skill's folder against its entry. `problem`: the folder cannot be read, and why."""

    name: str
    entry: Entry | None
    drift: Drift = field(default_factory=Drift)
    problem: str = ""


class Installed:
    """The skills of one user of a data root. Several programs may use it at once; blocks.

    Any call raises StorageUnavailable when the data root cannot be used, and ConfigError when the
    lock file is damaged.
    """

    def __init__(self, data_root: Path, user: str) -> None:
        ChatId(user, "any")
        self._user = user
        self._staging = Staging(data_root)
        self.folder = self._staging.folder(user)

    def entries(self) -> Mapping[str, Entry]:
        """Return what the lock file says, by the skills' names."""
        with self._changing():
            return lock.read(self.folder)

    def tree(self, name: str) -> Tree:
        """Return the files of a skill as they are now.

        Raises:
            UnknownSkill: there is none of that name.
            UnusableSkill: it holds links or special files.
        """
        with self._changing():
            return self._tree(name)

    def states(self) -> Sequence[State]:
        """Compare every skill with the lock file, by name."""
        with self._changing():
            entries = lock.read(self.folder)
            return [
                self._state(name, entries.get(name)) for name in sorted({*entries, *self._names()})
            ]

    def put(self, name: str, tree: Tree, version: Version, *, instead_of: Tree | None) -> None:
        """Put a skill in place, whole or not at all; what was there is kept as its former version.

        Raises:
            AlreadyExists: something else than `instead_of` is there by now.
            UnusableSkill: no skill can have that name here.
        """
        if name == lock.NAME or name.startswith(".") or "/" in name:
            raise UnusableSkill(f"no skill can be called {show(name)} here: change its name")
        with self._changing():
            old = self._tree(name) if self._is_there(name) else None
            if old != instead_of:
                raise AlreadyExists(
                    f"the skill {name} was changed by somebody else just now: look at it, and try "
                    "again"
                )
            former = None if old is None else self._version(name, old)
            self._replace(name, tree, version, former)

    def undo(self, name: str) -> Version:
        """Bring the former version of a skill back; the present one becomes the former.

        Raises:
            UnknownSkill: the skill is not installed, or has no former version.
        """
        with self._changing():
            entry = lock.read(self.folder).get(name)
            place = self._staging.former(self._user, name)
            if entry is None or entry.former is None or not place.is_dir():
                raise UnknownSkill(
                    f"there is no former version of {name}: only an update keeps one"
                )
            present = self._version(name, self._tree(name))
            self._replace(name, read_folder(place), entry.former, present)
            return entry.former

    def remove(self, name: str) -> None:
        """Take a skill away, with its former version.

        Raises:
            UnknownSkill: there is none of that name.
        """
        with self._changing():
            if not self._is_there(name) and name not in lock.read(self.folder):
                raise self._unknown(name)
            self._staging.change(Plan(user=self._user, name=name, entry=None), None)

    def relock(self) -> Sequence[str]:
        """Accept the files as they are into the lock file; returns the names that this changed."""
        with self._changing():
            old = lock.read(self.folder)
            new = {name: self._relocked(name, old.get(name)) for name in self._names()}
            lock.write(self.folder, new)
        return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))

    def _relocked(self, name: str, entry: Entry | None) -> Entry:
        found = self._version(name, self._tree(name))
        if entry is not None and entry.digest == found.digest:
            return entry
        return Entry(**found.model_dump(), former=entry.former if entry else None)

    def _version(self, name: str, tree: Tree) -> Version:
        """What is there now, with the source that it once came from."""
        entry = lock.read(self.folder).get(name)
        files = lock.file_digests(tree)
        if entry is not None and entry.files == files:
            return Version(**entry.model_dump(exclude={"former"}))
        return version_of(tree, entry.source if entry else "", entry.commit if entry else "")

    def _state(self, name: str, entry: Entry | None) -> State:
        if not self._is_there(name):
            return State(name, entry, Drift(missing_skill=True))
        try:
            files = lock.file_digests(self._tree(name))
        except (UnusableSkill, SourceUnavailable) as exc:
            return State(name, entry, problem=str(exc))
        return State(name, entry, lock.drift(entry, files) if entry else Drift())

    def _names(self) -> list[str]:
        return [
            place.name
            for place in self.folder.iterdir()
            if place.is_dir() and documents(child.name for child in place.iterdir())
        ]

    def _is_there(self, name: str) -> bool:
        return "/" not in name and name not in ("", ".", "..") and (self.folder / name).is_dir()

    def _tree(self, name: str) -> Tree:
        if not self._is_there(name):
            raise self._unknown(name)
        return read_folder(self.folder / name)

    def _unknown(self, name: str) -> UnknownSkill:
        known = ", ".join(sorted(self._names())[:20]) or "none"
        return UnknownSkill(
            f"the user {self._user} has no skill {name[:100]!r} installed; there are: {known}"
        )

    def _replace(self, name: str, tree: Tree, version: Version, former: Version | None) -> None:
        entry = Entry(**version.model_dump(), former=former)
        self._staging.change(Plan(user=self._user, name=name, entry=entry), tree)

    def _changing(self) -> AbstractContextManager[None]:
        return self._staging.changing(self._user)


def version_of(tree: Tree, source: str, commit: str = "") -> Version:
    """Return what a lock file keeps of these files, installed now."""
    files = lock.file_digests(tree)
    return Version(
        source=source,
        commit=commit,
        digest=set_digest(files),
        files=files,
        installed_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
