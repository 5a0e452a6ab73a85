"""Puts skills in place and takes them away, each in one step that a crash cannot cut.

    {data}/skills/{user}/{name}/            a skill
    {data}/skills/{user}/skills-lock.json   see lock
    {data}/skills/.former/{user}/{name}/    the version before, for `update --undo`
    {data}/skills/.staged/{random}/         what is about to be put in place
    {data}/skills/.lock                     held by whoever changes something

A change is written down in its staging folder (`plan.json`) before the one rename that does it.
Whoever changes something next finishes what an interrupted program has begun: if the skill in
place is the one that was planned, the rename has happened, and what follows it is done again.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import set_digest
from mcp_sandbox.skills.supply import lock
from mcp_sandbox.skills.supply.folder import read_folder
from mcp_sandbox.skills.supply.lock import Entry
from mcp_sandbox.skills.supply.tree import Tree
from mcp_sandbox.workspace import beneath
from mcp_sandbox.workspace.layout import open_data_root, storage_errors
from mcp_sandbox.workspace.whole_file import replace

_PLAN, _SKILL = "plan.json", "skill"


class Plan(BaseModel):
    """What shall become of a skill: its entry after the change; None: it goes away."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user: str
    name: str
    entry: Entry | None


class Staging:
    """The places of all users' skills in a data root. Blocks; raises OSError."""

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._skills = data_root / "skills"

    def folder(self, user: str) -> Path:
        """Return where a user's skills lie."""
        return self._skills / user

    def former(self, user: str, name: str) -> Path:
        """Return where the version before the present one is kept."""
        return self._skills / ".former" / user / name

    @contextmanager
    def changing(self, user: str) -> Generator[None]:
        """Let nobody else change skills meanwhile, and finish what was interrupted.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        with storage_errors(self._data_root):
            os.close(open_data_root(self._data_root))
            for folder in (self._skills, self.folder(user), self._skills / ".staged"):
                folder.mkdir(mode=0o700, exist_ok=True)
            held = os.open(self._skills / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                self._recover()
                yield
            finally:
                os.close(held)

    def change(self, plan: Plan, tree: Tree | None) -> None:
        """Do what a plan says; `tree` has the files of what is put in place."""
        stage = self._skills / ".staged" / secrets.token_hex(8)
        stage.mkdir(mode=0o700)
        if tree is not None:
            write_tree(stage / _SKILL, tree)
        replace(stage / _PLAN, plan.model_dump_json().encode())
        self._move(stage, plan)
        self._finish(stage, plan)

    def _move(self, stage: Path, plan: Plan) -> None:
        staged, skills = os.open(stage, os.O_RDONLY), os.open(self.folder(plan.user), os.O_RDONLY)
        here, there = _SKILL.encode(), os.fsencode(plan.name)
        try:
            if plan.entry is None:
                if self._is_there(plan):
                    beneath.rename_new(skills, there, staged, here)
            elif self._is_there(plan):
                beneath.exchange(staged, here, skills, there)
            else:
                beneath.rename_new(staged, here, skills, there)
            os.fsync(skills)
        finally:
            os.close(staged)
            os.close(skills)

    def _finish(self, stage: Path, plan: Plan) -> None:
        """Do what follows the rename; may be done twice."""
        folder = self.folder(plan.user)
        entries = {name: entry for name, entry in lock.read(folder).items() if name != plan.name}
        if plan.entry is not None:
            entries[plan.name] = plan.entry
        lock.write(folder, entries)
        former, old = self.former(plan.user, plan.name), stage / _SKILL
        if plan.entry is None or old.is_dir():
            _discard(former)
        if plan.entry is not None and old.is_dir():
            former.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            old.rename(former)
        _discard(stage)

    def _recover(self) -> None:
        for stage in (self._skills / ".staged").iterdir():
            plan = _read_plan(stage)
            if plan is not None and self._has_happened(plan):
                self._finish(stage, plan)
            else:
                _discard(stage)

    def _has_happened(self, plan: Plan) -> bool:
        if plan.entry is None or not self._is_there(plan):
            return plan.entry is None and not self._is_there(plan)
        try:
            tree = read_folder(self.folder(plan.user) / plan.name)
        except (UnusableSkill, SourceUnavailable):
            return False
        return set_digest(lock.file_digests(tree)) == plan.entry.digest

    def _is_there(self, plan: Plan) -> bool:
        return os.path.lexists(self.folder(plan.user) / plan.name)


def write_tree(folder: Path, tree: Tree) -> None:
    """Write all files into a new folder, and wait until they are on the disk. Raises OSError."""
    folder.mkdir(mode=0o755)
    for path, file in tree.items():
        place = folder / path
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(place, flags, 0o755 if file.executable else 0o644)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.data)
            stream.flush()
            os.fsync(descriptor)


def _read_plan(stage: Path) -> Plan | None:
    """What an interrupted program was about to do; None if it had not come so far."""
    try:
        return Plan.model_validate_json((stage / _PLAN).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _discard(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
