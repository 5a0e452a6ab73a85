"""The installed skills of a user: put in place, replaced and taken away as a whole. Blocking.

    {data}/skills/{user}/{name}/            a skill
    {data}/skills/{user}/skills-lock.json   where each comes from, and the digests of its files
    {data}/skills/.staged/                  a change that is being made
    {data}/skills/.lock                     locked while something changes

A skill that was put there by hand has no entry until `lock` gives it one.

A change lies whole in `.staged` before the one rename that does it, and the lock file is written
after it. A crash between the two leaves a skill that is whole and differs from its entry; the same
command, given again, writes the entry.
"""

import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from mcp_sandbox import durable, errors
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.contents import digest_of, set_digest
from mcp_sandbox.skills.supply.tree import Tree, documents, read_folder, show
from mcp_sandbox.workspace import beneath
from mcp_sandbox.workspace.layout import open_data_root, storage_errors

LOCK_FILE = "skills-lock.json"
_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class LockEntry(BaseModel, frozen=True):
    """An installed skill as it was put in place. `commit` is empty unless it came from git.

    `source` is what `update` asks for again; empty for what was put there by hand. `installed_at`
    is in UTC, as ISO 8601 writes it. Other fields are left out: version 0.2 had one more.
    """

    source: str
    commit: str = ""
    digest: _Digest
    files: dict[str, _Digest]
    installed_at: str


class _LockFile(BaseModel, frozen=True, extra="forbid"):
    version: int = Field(default=1, ge=1, le=1)
    skills: dict[str, LockEntry] = {}


@dataclass(frozen=True)
class InstalledState:
    """A skill as it is now against its entry; `problem` says why there is no `tree`."""

    name: str
    entry: LockEntry | None
    tree: Tree | None = None
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""

    @property
    def differs(self) -> bool:
        """Whether it is not what the lock file says."""
        differences = self.changed or self.added or self.missing or self.problem
        return self.entry is None or bool(differences)


class InstalledSkills:
    """The skills of one user of a data root. Several programs may use it at once; blocks.

    Any call raises StorageUnavailable when the data root cannot be used, and ConfigError when the
    lock file is damaged.
    """

    def __init__(self, data_root: Path, user: str) -> None:
        self._user = ChatId(user, "any").user
        self._data_root = data_root
        self._skills = data_root / "skills"
        self._stage = self._skills / ".staged"
        self.folder = self._skills / user

    def entries(self) -> Mapping[str, LockEntry]:
        with self._changing():
            return _read_lock(self.folder)

    def states(self) -> Sequence[InstalledState]:
        """Compare every skill with the lock file, by name."""
        with self._changing():
            entries = _read_lock(self.folder)
            names = sorted({*entries, *self._names()})
            return [self._state(name, entries.get(name)) for name in names]

    def state(self, name: str) -> InstalledState:
        """Compare one skill with the lock file. Raises UnknownSkill: there is none of that name."""
        with self._changing():
            return self._state(name, self._known(name))

    def put(
        self, name: str, tree: Tree, source: str, commit: str = "", *, instead_of: Tree | None
    ) -> None:
        """Put a skill in place, whole or not at all.

        Raises:
            AlreadyExists: something else than `instead_of` is there by now.
            UnusableSkill: no skill can have that name here.
        """
        if name == LOCK_FILE or name.startswith(".") or "/" in name:
            raise errors.UnusableSkill(f"no skill can be called {show(name)} here: change its name")
        with self._changing():
            old = read_folder(self.folder / name) if self._is_there(name) else None
            if old != instead_of:
                raise errors.AlreadyExists(
                    f"the skill {name} was changed by another process: look at it, and try again"
                )
            self._carry_out(name, tree, _entry(tree, source, commit))

    def remove(self, name: str) -> None:
        """Take a skill away. Raises UnknownSkill: there is none of that name."""
        with self._changing():
            self._known(name)
            self._carry_out(name, None, None)

    def relock(self) -> Sequence[str]:
        """Accept the files as they are into the lock file; returns the names that this changed."""
        with self._changing():
            old = _read_lock(self.folder)
            new = {
                name: _present(old.get(name), read_folder(self.folder / name))
                for name in self._names()
            }
            _write_lock(self.folder, new)
        return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))

    def _state(self, name: str, entry: LockEntry | None) -> InstalledState:
        if not self._is_there(name):
            return InstalledState(name, entry, problem="its folder is gone")
        try:
            tree = read_folder(self.folder / name)
        except (errors.UnusableSkill, errors.SourceUnavailable) as exc:
            return InstalledState(name, entry, problem=str(exc))
        now = file_digests(tree)
        then = now if entry is None else entry.files
        changed = tuple(path for path in then if path in now and now[path] != then[path])
        added = tuple(path for path in now if path not in then)
        missing = tuple(path for path in then if path not in now)
        return InstalledState(name, entry, tree, changed, added, missing)

    def _names(self) -> Iterable[str]:
        for place in self.folder.iterdir():
            if place.is_dir() and documents(child.name for child in place.iterdir()):
                yield place.name

    def _is_there(self, name: str) -> bool:
        return "/" not in name and name not in ("", ".", "..") and (self.folder / name).is_dir()

    def _known(self, name: str) -> LockEntry | None:
        entry = _read_lock(self.folder).get(name)
        if entry is None and not self._is_there(name):
            known = ", ".join(sorted(self._names())[:20]) or "none"
            raise errors.UnknownSkill(
                f"the user {self._user} has no skill {name[:100]!r} installed; there are: {known}"
            )
        return entry

    @contextmanager
    def _changing(self) -> Generator[None]:
        """Keep others from changing skills, and drop what was interrupted."""
        with storage_errors(self._data_root):
            os.close(open_data_root(self._data_root))
            for folder in (self._skills, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            with durable.locked(self._skills / ".lock"):
                _discard(self._stage)
                yield

    def _carry_out(self, name: str, tree: Tree | None, entry: LockEntry | None) -> None:
        """Put a tree in place, or take away what is there."""
        # Read first: where the lock file is damaged nothing changes.
        entries = {each: old for each, old in _read_lock(self.folder).items() if each != name}
        staged, place = self._stage / "skill", self.folder / name
        self._stage.mkdir(mode=0o700)
        if tree is None:
            if os.path.lexists(place):
                place.rename(staged)
        else:
            _write_tree(staged, tree)
            if not durable.publish_folder(staged, place):
                both = os.fsencode(staged), os.fsencode(place)
                beneath.exchange(beneath.AT_CWD, both[0], beneath.AT_CWD, both[1])
        durable.sync(self.folder)
        _write_lock(self.folder, {**entries, name: entry} if entry else entries)
        _discard(self._stage)


def _write_tree(folder: Path, tree: Tree) -> None:
    """Write all files into a new folder. Raises OSError."""
    folder.mkdir(mode=0o755)
    for path, file in tree.items():
        place = folder / path
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        place.write_bytes(file.data)
        place.chmod(0o755 if file.executable else 0o644)


def file_digests(tree: Tree) -> dict[str, str]:
    """Return the digest of each file by its path."""
    return {path: digest_of(file.data) for path, file in tree.items()}


def _present(entry: LockEntry | None, tree: Tree) -> LockEntry:
    """Return what is there now, with the source that it once came from."""
    if entry is None or entry.files != file_digests(tree):
        return _entry(tree, entry.source if entry else "", entry.commit if entry else "")
    return entry


def _entry(tree: Tree, source: str, commit: str) -> LockEntry:
    files, now = file_digests(tree), datetime.now(UTC).isoformat(timespec="seconds")
    digest = set_digest(files)
    return LockEntry(source=source, commit=commit, digest=digest, files=files, installed_at=now)


def _read_lock(folder: Path) -> Mapping[str, LockEntry]:
    path = folder / LOCK_FILE
    try:
        return _LockFile.model_validate_json(path.read_bytes()).skills
    except FileNotFoundError:
        return {}
    except ValidationError as exc:
        raise errors.ConfigError(
            f"{path} is damaged: move it away; `mcp-sandbox skills lock` writes it anew from the "
            "files that are there, but not where they came from"
        ) from exc


def _write_lock(folder: Path, entries: Mapping[str, LockEntry]) -> None:
    content = _LockFile(skills=dict(sorted(entries.items()))).model_dump(mode="json")
    data = json.dumps(content, indent=1, ensure_ascii=False).encode()
    durable.write_file(folder / LOCK_FILE, data + b"\n")


def _discard(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()
