"""Which version of each skill a chat has, and how its sandbox comes to see it.

One version of each, whole, until another is wanted. The copies are made by blocking calls.

A sandbox sees a folder of its chat read-only, with a copy of each skill that the chat has. A copy
is made beside, whole and on the disk, then given its name or exchanged with what has it in one
step. Nothing ever sees half of one. What reads the former version can go on: it is kept, for a
while, where it was moved to. Files are 0444, those that begin with "#!" 0555: most skills come
without such bits.

    {tree}/view/{name}/     as the sandbox sees it: the version is what lies there
           new-{random}/    made for the view, or replaced in it
           active.json      the names by the uris of the skills, the last activated one last
           lock             held by what changes the above

The version stays with the chat's files, also after the end of its sandbox and its server, and after
edits of the skill. It is removed when the chat begins with an empty workspace.
"""

import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread

from mcp_sandbox.backends.base import Sandbox, ShowsSkills
from mcp_sandbox.durable import locked, publish_folder, read_note, sync, write_note
from mcp_sandbox.errors import Busy, CallerError, TooLarge, UnknownSkill
from mcp_sandbox.models import SKILLS, ChatId
from mcp_sandbox.skills.contents import digest_of, gather, open_folder, read_whole
from mcp_sandbox.skills.declared import Requirement
from mcp_sandbox.skills.front_matter import split
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.skill import DOCUMENT, Contents, Diagnostic, Skill
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.workspace.beneath import AT_CWD, exchange
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import SHOWN, storage_errors

logger = logging.getLogger(__name__)

MAX_PINNED_BYTES = 256 * 1024 * 1024
"""So much of skills a chat may have; it does not count for the size of its workspace."""
_NEW = "new-"
_REPLACED_KEPT = 3
_LONGEST_NAME = 200
Result = TypeVar("Result")

_TRIES = 3


class PinStore:
    """The versions that one chat has. `tree` is the server's own, and has been made."""

    def __init__(self, tree: Path) -> None:
        self._tree, self._active = tree, tree / "active.json"

    def names(self) -> dict[str, str]:
        """Return the names of the skills' folders by uri; none if active.json is unreadable."""
        try:
            return {uri: str(name) for uri, name in (read_note(self._active) or {}).items()}
        except (OSError, ValueError) as exc:
            what = "%s is unreadable, skills are given to the chat anew: %s"
            logger.warning(what, self._active, exc)
            return {}

    def last(self) -> str | None:
        """Return the path in the sandbox of the skill activated last; None if it is gone."""
        name = next(reversed(self.names().values()), None)
        return path_of(name) if name and self.folder(name).is_dir() else None

    def note_last(self, uri: str) -> None:
        """Remember which skill was activated last. Raises OSError."""
        with locked(self._tree / "lock"):
            names = self.names()
            if names and [*names][-1] != uri:
                name = names.pop(uri)
                write_note(self._active, {**names, uri: name})

    def folder(self, name: str) -> Path:
        return self._tree / SHOWN / name

    def find(self, uri: str) -> tuple[str, Contents] | None:
        """Return the name and files of a skill as the chat has it; None if they are unreadable."""
        name = self.names().get(uri)
        try:
            return (name, gather(self.folder(name), anchor=self._tree).contents) if name else None
        except (OSError, TooLarge):
            return None

    def shown(self) -> list[str]:
        """Return the names in the view. Raises OSError."""
        return sorted(each.name for each in (self._tree / SHOWN).iterdir())

    def read_all(self, name: str) -> dict[str, bytes]:
        """Read the files of a skill. Raises OSError."""
        contents = gather(self.folder(name), anchor=self._tree).contents
        return {file.path: self.read(name, file.path) for file in contents.files}

    def read(self, name: str, path: str) -> bytes:
        """Read one of the files of a skill. Raises OSError."""
        with open_folder(self.folder(name), self._tree) as folder:
            return read_whole(folder, path).data

    def pin(self, skill: Skill, contents: Contents, files: Mapping[str, bytes]) -> str:
        """Put that version, which has those files, into the view; returns its name there.

        Raises:
            TooLarge: the chat has too much of skills.
            OSError: it cannot be written.
        """
        with locked(self._tree / "lock"):
            names = self.names()
            name = names.get(skill.uri) or name_in_view(skill, names.values())
            self._check_room(skill, name, contents)
            new = self._tree / f"{_NEW}{secrets.token_hex(8)}"
            try:
                _write(new, files)
            except BaseException:
                _delete(new)
                raise
            if skill.uri not in names:
                # Written before the folder exists: a name without a folder is ignored.
                write_note(self._active, {**names, skill.uri: name})
            _place(new, self.folder(name))
            old = sorted(self._tree.glob(f"{_NEW}*"), key=lambda each: each.lstat().st_ctime_ns)
            for folder in old[:-_REPLACED_KEPT]:
                _delete(folder)
        return name

    def _check_room(self, skill: Skill, name: str, contents: Contents) -> None:
        used = sum(
            file.lstat().st_size
            for folder in (self._tree / SHOWN).iterdir()
            if folder.name != name
            for file in folder.rglob("*")
            if file.is_file()
        )
        if used + sum(file.size for file in contents.files) > MAX_PINNED_BYTES:
            raise TooLarge(
                f"with {skill.name} this chat would have over {MAX_PINNED_BYTES // 1024**2} MiB of "
                "skills: go on with those that are active, or empty the workspace by sandbox_reset"
            )


def path_of(name: str) -> str:
    """Return the path in the sandbox of the skill with that name in the view."""
    return f"{SKILLS}/{name}"


def name_in_view(skill: Skill, taken: Collection[str] = ()) -> str:
    """Return a name for a skill's folder in a view that is not among those taken."""
    # Other characters than these may mean something to a shell or a path.
    name = "".join(
        char
        if char.isalnum() or char in "-_.+"
        else "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogateescape"))
        for char in skill.name
    )
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    mark = hashlib.sha256(skill.uri.encode(errors="surrogateescape")).hexdigest()[:8]
    if len(name.encode()) > _LONGEST_NAME:
        return f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}%{mark}"
    # Where the bare name means another one, it alone would not tell them apart.
    return f"{name}@{mark}" if skill.shadowed_by or name in taken else name


def drift(pinned: Contents, current: Contents) -> tuple[str, ...]:
    """Return the paths of the files in which two versions differ."""
    before = {file.path: file.digest for file in pinned.files}
    now = {file.path: file.digest for file in current.files}
    return tuple(sorted({path for path, _ in before.items() ^ now.items()}))


def _write(new: Path, files: Mapping[str, bytes]) -> None:
    new.mkdir(mode=0o755)
    for path, data in files.items():
        place = new / path
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with place.open("xb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o555 if data.startswith(b"#!") else 0o444)
    for folder, _, _ in os.walk(new):
        # The top folder stays writable: it is still to be moved.
        Path(folder).chmod(0o755 if Path(folder) == new else 0o555)


def _delete(folder: Path) -> None:
    for inner, _, _ in os.walk(folder):
        Path(inner).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def _place(new: Path, target: Path) -> None:
    """Put a folder into the view; what is there goes to where the folder was."""
    if not publish_folder(new, target):
        # To move a directory writes its "..", which needs the right to write in it.
        target.chmod(0o755)
        exchange(AT_CWD, os.fsencode(new), AT_CWD, os.fsencode(target))
        sync(target.parent)
    target.chmod(0o555)


@dataclass(frozen=True)
class Activation:
    """A skill as a chat got it. `body` is its text after the front matter, as it is in the file.

    `path_in_sandbox` is the folder of its files there, if any. `needs` is what it declares, `unmet`
    what of that the sandbox lacks; `unchecked` says why that is not known. `drift` names the files
    that have changed in the library since; `left_out` says what of its folder in the library is not
    copied. `repeated`: the chat has been given this text before.
    """

    skill: Skill
    digest: str
    body: bytes
    contents: Contents
    path_in_sandbox: str | None = None
    needs: Sequence[Requirement] = ()
    unmet: Sequence[Requirement] = ()
    unchecked: str = ""
    drift: tuple[str, ...] = ()
    left_out: tuple[Diagnostic, ...] = ()
    repeated: bool = False

    @property
    def uri(self) -> str:
        return self.skill.uri

    @property
    def name(self) -> str:
        return self.skill.name


class ChatPins:
    """The versions of skills that one chat has."""

    def __init__(self, chat: ChatId, workspaces: Workspaces) -> None:
        self._chat = chat
        self._data_root = workspaces.data_root
        tree = workspaces.skills_of(chat)
        self._pins = PinStore(tree) if tree else None
        self._limiter = anyio.CapacityLimiter(1)
        self._showing = anyio.Lock()
        self._variables: Mapping[str, str] | None = None

    async def variables(self) -> Mapping[str, str]:
        """Return the variables of commands: SKILL_DIR, the skill that was activated last."""
        if self._variables is None:
            last = await self._run(self._pins.last) if self._pins else None
            self._variables = {"SKILL_DIR": last} if last else {}
        return self._variables

    def forget(self) -> None:
        """Note that the chat was emptied, and has no skill."""
        self._variables = None

    async def activate(self, skill: Skill, library: SkillLibrary, *, refresh: bool) -> Activation:
        """Copy the skill as it is now, unless the chat has it and `refresh` is not set.

        Where sandboxes show no skills, nothing is copied. The chat must have its directories.

        Raises:
            UnknownSkill: it is gone.
            Busy: its files change all the time.
            TooLarge: the skills of the chat are too large.
        """
        pins = self._pins
        if pins is None:
            return await _read_whole(skill, library)
        known = await self._run(partial(pins.find, skill.uri))
        if known is None or refresh:
            known = await self._take(pins, skill, library, known)
        name, contents = known
        await self._run(partial(pins.note_last, skill.uri))
        self._variables = {"SKILL_DIR": path_of(name)}
        digest = contents.digest
        event(logger, "skill activated", chat=str(self._chat), skill=skill.uri, digest=digest)
        # A skill that cannot be read now counts as changed in every file.
        current = Contents((), "")
        with suppress(CallerError):
            current = await library.contents(skill)
        body = split(await self._run(partial(pins.read, name, DOCUMENT))).body
        others, left_out = drift(contents, current), current.diagnostics
        return Activation(
            skill, digest, body, contents, path_of(name), drift=others, left_out=left_out
        )

    async def show_in(self, sandbox: Sandbox, only: str = "") -> None:
        """Have a sandbox without mounts show the chat's skills, or one of them."""
        pins = self._pins
        if pins is None or not isinstance(sandbox, ShowsSkills):
            return
        async with self._showing:
            for name in await self._run(pins.shown):
                if only in ("", path_of(name)):
                    await sandbox.show_skill(name, await self._run(partial(pins.read_all, name)))

    async def file(self, skill: Skill, path: str) -> tuple[Contents, bytes] | None:
        """Return the contents of the chat's version, and one file of it; None if it has none."""
        pins = self._pins
        known = await self._run(partial(pins.find, skill.uri)) if pins else None
        if pins is None or known is None:
            return None
        name, contents = known
        if not any(file.path == path for file in contents.files):
            near = get_close_matches(path[:140], [file.path for file in contents.files], n=1)
            hint = f"the nearest is {near[0]!r}" if near else "skill_activate lists its files"
            raise UnknownSkill(
                f"{skill.name} has no file {path[:140]!r} as this chat has it: {hint}"
            )
        return contents, await self._run(partial(pins.read, name, path))

    async def _take(
        self,
        pins: PinStore,
        skill: Skill,
        library: SkillLibrary,
        known: tuple[str, Contents] | None,
    ) -> tuple[str, Contents]:
        for _ in range(_TRIES):
            contents = await library.contents(skill)
            if known and known[1].digest == contents.digest:
                return known
            files = {file.path: await library.read(skill, file.path) for file in contents.files}
            if all(digest_of(files[file.path]) == file.digest for file in contents.files):
                return await self._run(partial(pins.pin, skill, contents, files)), contents
        raise _being_changed(skill)

    async def _run(self, look: Callable[[], Result]) -> Result:
        """Run work on the disk in a thread, one at a time."""
        look = storage_errors(self._data_root)(look)
        return await to_thread.run_sync(look, limiter=self._limiter)


async def _read_whole(skill: Skill, library: SkillLibrary) -> Activation:
    """Return the skill with its text and list of files as they were at one moment."""
    for _ in range(_TRIES):
        contents = await library.contents(skill)
        document = await library.read(skill, DOCUMENT)
        digests = {file.path: file.digest for file in contents.files}
        if digests.get(DOCUMENT) == digest_of(document):
            body, left_out = split(document).body, contents.diagnostics
            return Activation(skill, contents.digest, body, contents, left_out=left_out)
    raise _being_changed(skill)


def _being_changed(skill: Skill) -> Busy:
    return Busy(f"the files of {skill.name} are just being changed: call again in a moment")
