"""Copies skills to where the sandbox of a chat sees them: one version of each, until a refresh.

The version stays with the chat's files, also after the end of its sandbox and its server, and after
edits of the skill. It is removed when the chat begins with an empty workspace.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

import anyio
from anyio import to_thread

from mcp_sandbox.errors import Busy, CallerError, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.pins import Pins, drift, path_of
from mcp_sandbox.skills.contents import digest_of
from mcp_sandbox.skills.front_matter import split
from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.skill import Contents, Diagnostic, Findings, Skill, Unmet
from mcp_sandbox.skills.uris import DOCUMENT
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.layout import storage_errors

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TRIES = 3


@dataclass(frozen=True)
class Activation:
    """A skill as a chat got it. `body` is its text after the front matter, as it is in the file.

    `path_in_sandbox` is the folder of its files there, if any. `unchecked` says why it is not known
    what the sandbox lacks. `drift` names the files that have changed in the library since;
    `left_out` says what of its folder in the library is not copied. `repeated`: the chat has been
    given this text before.
    """

    skill: Skill
    digest: str
    body: bytes
    contents: Contents
    path_in_sandbox: str | None = None
    unmet: tuple[Unmet, ...] = ()
    unchecked: str = ""
    findings: Findings | None = None
    drift: tuple[str, ...] = ()
    left_out: tuple[Diagnostic, ...] = ()
    repeated: bool = False

    @property
    def uri(self) -> str:
        return self.skill.uri

    @property
    def name(self) -> str:
        return self.skill.name


class Pinning:
    """The versions of skills that one chat has."""

    def __init__(self, chat: ChatId, workspaces: Workspaces) -> None:
        self._chat = chat
        self._data_root = workspaces.data_root
        tree = workspaces.skills_of(chat)
        self._pins = Pins(tree) if tree else None
        self._limiter = anyio.CapacityLimiter(1)
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

    async def activate(self, skill: Skill, library: Library, *, refresh: bool) -> Activation:
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
        self, pins: Pins, skill: Skill, library: Library, known: tuple[str, Contents] | None
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


async def _read_whole(skill: Skill, library: Library) -> Activation:
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
