"""Puts skills where the sandbox of a chat sees them, one version of each, until another is wanted.

The version stays with the chat's files: over the end of its sandbox, of its server, and over edits
of the skill. It goes when the chat begins with an empty workspace.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

import anyio
from anyio import to_thread

from mcp_sandbox.errors import Busy, CallerError, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.contents import digest_of
from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.models import Contents, Diagnostic, Skill
from mcp_sandbox.skills.pins import Pin, Pins, drift
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.skills.uris import DOCUMENT
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import storage_errors

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TRIES = 3
_NOTHING = Contents((), "")


@dataclass(frozen=True)
class Pinned:
    """The version of a skill that a chat has.

    `path` is where its sandbox has it. `drift` names the files that are otherwise in the library
    now; `left_out` says what is in the folder there and in no version. `copied`: the chat's code
    can change it.
    """

    contents: Contents
    document: bytes
    path: str
    drift: tuple[str, ...]
    left_out: tuple[Diagnostic, ...]
    copied: bool


class Pinning:
    """The versions that one chat has."""

    def __init__(self, chat: ChatId, workspaces: Workspaces, snapshots: Snapshots) -> None:
        self._chat = chat
        self._data_root = workspaces.data_root
        self._view = workspaces.view_of(chat)
        self._pins = Pins(chat.user, self._view, snapshots) if self._view else None
        self._snapshots = snapshots
        self._limiter = anyio.CapacityLimiter(1)
        self._variables: Mapping[str, str] | None = None

    async def variables(self) -> Mapping[str, str]:
        """What commands find in their environment: SKILL_DIR, the skill that was activated last."""
        if self._variables is None:
            last = await self._run(self._pins.last) if self._pins else None
            self._variables = {"SKILL_DIR": last} if last else {}
        return self._variables

    def forget(self) -> None:
        """The chat has begun anew, and has no skill."""
        self._variables = None

    async def activate(self, skill: Skill, library: Library, *, refresh: bool) -> Pinned | None:
        """Give the chat the skill as it is now, unless it has it and does not want another version.

        None where sandboxes show no skills. The chat's files have been made.

        Raises:
            UnknownSkill: it is gone.
            Busy: it is being changed all the time.
            TooLarge: the chat has too much of skills.
            StorageUnavailable: the data root cannot be used.
        """
        pins = self._pins
        if pins is None or self._view is None:
            return None
        known = await self._known(pins, skill)
        if known is None or refresh:
            known = await self._take(pins, skill, library, known)
        pin, contents = known
        await self._run(partial(pins.note_last, pin))
        self._variables = {"SKILL_DIR": pins.path(pin.name)}
        event(logger, "skill activated", chat=str(self._chat), skill=skill.uri, digest=pin.digest)
        current = await _current(skill, library)
        return Pinned(
            contents=contents,
            document=await self._run(partial(pins.read, pin, DOCUMENT)),
            path=pins.path(pin.name),
            drift=drift(contents, current),
            left_out=current.diagnostics,
            copied=self._view.copied,
        )

    async def file(self, skill: Skill, path: str) -> tuple[Contents, bytes] | None:
        """A file of the version that the chat has, and all of that; None if it has none.

        Raises:
            UnknownSkill: there is no such file in it.
        """
        pins = self._pins
        known = await self._known(pins, skill) if pins else None
        if pins is None or known is None:
            return None
        pin, contents = known
        if not any(file.path == path for file in contents.files):
            near = get_close_matches(path[:140], [file.path for file in contents.files], n=1)
            hint = f"the nearest is {near[0]!r}" if near else "skill_activate lists its files"
            raise UnknownSkill(
                f"{skill.name} has no file {path[:140]!r} as this chat has it: {hint}"
            )
        return contents, await self._run(partial(pins.read, pin, path))

    async def _known(self, pins: Pins, skill: Skill) -> tuple[Pin, Contents] | None:
        return await self._run(partial(_look, pins, skill))

    async def _take(
        self, pins: Pins, skill: Skill, library: Library, known: tuple[Pin, Contents] | None
    ) -> tuple[Pin, Contents]:
        for _ in range(_TRIES):
            contents = await library.contents(skill)
            if known and known[0].digest == contents.digest:
                return known
            if await self._copy(skill, contents, library):
                pin = await self._run(partial(_pin, pins, skill, contents))
                if pin:
                    return pin, contents
        raise Busy(f"the files of {skill.name} are just being changed: call again in a moment")

    async def _copy(self, skill: Skill, contents: Contents, library: Library) -> bool:
        """Have a snapshot; False if the files are not those of `contents` any more."""
        digest = contents.digest
        if not await self._run(partial(self._snapshots.has, self._chat.user, digest)):
            files = {file.path: await library.read(skill, file.path) for file in contents.files}
            if any(digest_of(files[file.path]) != file.digest for file in contents.files):
                return False
            await self._run(partial(self._snapshots.add, self._chat.user, digest, files))
        return True

    async def _run(self, look: Callable[[], Result]) -> Result:
        """Block on the disk, one at a time."""

        def guarded() -> Result:
            with storage_errors(self._data_root):
                return look()

        return await to_thread.run_sync(guarded, limiter=self._limiter)


def _look(pins: Pins, skill: Skill) -> tuple[Pin, Contents] | None:
    try:
        pin = pins.all().get(skill.uri)
    except FileNotFoundError:
        # The chat has no files yet.
        return None
    contents = pins.contents(pin) if pin else None
    return (pin, contents) if pin and contents else None


def _pin(pins: Pins, skill: Skill, contents: Contents) -> Pin | None:
    try:
        return pins.pin(skill, contents)
    except FileNotFoundError:
        # The snapshot was swept meanwhile: nobody had it.
        return None


async def _current(skill: Skill, library: Library) -> Contents:
    try:
        return await library.contents(skill)
    except CallerError:
        # What cannot be read now differs in everything.
        return _NOTHING
