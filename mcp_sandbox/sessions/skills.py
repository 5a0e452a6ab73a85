"""The skills that a chat can activate, and those that it has activated.

Skills that their authors hide from models are not listed. What a chat has activated is kept in
memory, so that a text is not given twice; a client that connects anew is given it again.

What of its needs a sandbox lacks is asked at each activation: that takes some tens of milliseconds,
and an agent may have installed something meanwhile.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mcp_sandbox.errors import CallerError, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.gate import Action, AdmittedCall, Gate
from mcp_sandbox.sessions.skill_pins import Activation, ChatPins
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.contents import digest_of
from mcp_sandbox.skills.declared import (
    COMMAND,
    DECLARING,
    build_question,
    find_missing,
    read_declared,
)
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.scan import Whose
from mcp_sandbox.skills.search import Page, Placed, SkillSearch, list_page, sort_by_name
from mcp_sandbox.skills.skill import Contents, Skill, SkillFile

_MOST_CHATS = 1000
# How old a listing may be: reading thousands of folders takes longer than making a page.
_LISTED_S = 1.5


@dataclass(frozen=True)
class ActiveSkill:
    """A skill that a chat has activated, and which version of it."""

    uri: str
    name: str
    digest: str
    path_in_sandbox: str | None
    allowed_tools: tuple[str, ...] = ()


@dataclass
class ActivatedSkills:
    """What a chat has activated, and the digests of the texts its client got, both by URI."""

    active: dict[str, ActiveSkill] = field(default_factory=dict[str, ActiveSkill])
    told: dict[str, str] = field(default_factory=dict[str, str])


class Skills:
    """The skills of all chats."""

    def __init__(self, library: SkillLibrary) -> None:
        self.library = library
        self._learned: OrderedDict[ChatId, ActivatedSkills] = OrderedDict()
        self.finder = SkillSearch()

    async def offered(self, whose: Whose) -> tuple[Skill, ...]:
        """Return the skills that models may know, also those that another of their name hides."""
        return _for_models(await self.library.catalogue(whose))

    def find_activated(self, chat: ChatId) -> ActivatedSkills:
        learned = self._learned.setdefault(chat, ActivatedSkills())
        self._learned.move_to_end(chat)
        if len(self._learned) > _MOST_CHATS:
            # A user with many chats loses the oldest of their own, not those of others.
            oldest = next(known for known in self._learned if known.user == chat.user)
            del self._learned[next(iter(self._learned)) if oldest == chat else oldest]
        return learned

    def connected(self, chat: ChatId) -> None:
        """Note that the chat has a new client, which has got no text yet."""
        if chat in self._learned:
            self._learned[chat].told.clear()


class ChatSkills:
    """The skills of one chat; `pinning` has its versions, and `gate` leads to its sandbox."""

    def __init__(self, chat: ChatId, skills: Skills, pinning: ChatPins, gate: Gate) -> None:
        self._chat = chat
        self._pinning = pinning
        self._gate = gate
        self._skills = skills
        self.library = skills.library

    async def list(
        self, query: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page:
        """Return a page of the skills, by name; with a query, of those that match, the best first.

        A change is visible after two seconds at the latest, or with the next activation.

        Raises InvalidArgument: the cursor is not one of this listing.
        """
        catalogue = await self.library.catalogue(self._chat, max_age_s=_LISTED_S)
        offered = _for_models(catalogue)
        if query and query.strip():
            user = self._chat.user
            page = await self._skills.finder.find(user, offered, query, cursor, limit)
        else:
            page = list_page(_by_name(catalogue), cursor, limit)
        if not catalogue.unusable:
            return page
        number = len(catalogue.unusable)
        folders = "1 folder" if number == 1 else f"{number:,} folders"
        note = f"{folders} cannot be used; the user can ask `mcp-sandbox skills doctor` why"
        return replace(page, notes=(*page.notes, note))

    async def activate(
        self, name: str, *, refresh: bool = False, by_user: bool = False
    ) -> Activation:
        """Copy the skill to where the sandbox sees it; return its text, of the version it has.

        `refresh`: of the version of now, even if the text was given before. `by_user`: also a
        skill that its author hides from models.

        Raises:
            UnknownSkill: there is none of this name.
            Busy: it is being changed.
            OperatorError: there is no sandbox to put it into.
        """
        skill = await self._found(name, by_user=by_user)
        learned = self._skills.find_activated(self._chat)
        arguments = {"name": name, "refresh": refresh}
        # The sandbox first: it makes the chat's directories, or takes those of a warm one.
        async with self._gate.enter(Action(self._chat, "skill_activate", arguments)) as entered:
            activation = await self._pinning.activate(skill, self.library, refresh=refresh)
            await self._pinning.show_in(entered.held.sandbox, activation.path_in_sandbox or "-")
            activation = await self._checked(activation, entered)
        repeated = not refresh and learned.told.get(skill.uri) == activation.digest
        path, tools = activation.path_in_sandbox, skill.front.allowed_tools
        learned.active[skill.uri] = ActiveSkill(
            skill.uri, skill.name, activation.digest, path, tools
        )
        learned.told[skill.uri] = activation.digest
        return replace(activation, repeated=repeated)

    async def _checked(self, activation: Activation, entered: AdmittedCall) -> Activation:
        """Return it with what the skill declares, and what of that the sandbox lacks."""
        skill, paths = activation.skill, {file.path for file in activation.contents.files}
        try:
            declaring = [path for path in DECLARING if path in paths]
            files = {path: (await self._file(skill, path))[1] for path in declaring}
            activation = replace(activation, needs=(needs := read_declared(skill.front, files)))
            if not needs:
                return activation
            # In /workspace, modules of the agent would take the place of the program's own.
            asked = build_question(needs)
            result = await entered.runtime.exec(COMMAND, cwd="/", stdin=asked, timeout_s=10.0)
            return replace(activation, unmet=find_missing(needs, result.stdout))
        except CallerError as exc:
            return replace(activation, unchecked=str(exc))
        except ValueError as exc:
            return replace(activation, unchecked=f"the sandbox did not tell what it has: {exc}")

    async def read(self, name: str, path: str) -> tuple[SkillFile, bytes]:
        """Return one file of a skill, as the chat has it; UnknownSkill if there is none."""
        contents, data = await self._file(await self._found(name), path)
        known = next((file for file in contents.files if file.path == path), None)
        if known is None:
            raise UnknownSkill(f"{name} has no file {path!r}: skill_activate lists its files")
        # The file may have changed since it was listed: describe the bytes that were read.
        return replace(known, size=len(data), digest=digest_of(data)), data

    async def _file(self, skill: Skill, path: str) -> tuple[Contents, bytes]:
        if pinned := await self._pinning.file(skill, path):
            return pinned
        data = await self.library.read(skill, path)
        return await self.library.contents(skill), data

    def forget(self) -> None:
        """Note that the chat was emptied, and has no skill."""
        learned = self._skills.find_activated(self._chat)
        learned.active.clear()
        learned.told.clear()

    async def _found(self, name: str, *, by_user: bool = False) -> Skill:
        catalogue = await self.library.catalogue(self._chat)
        skill = catalogue.find(name)
        known = by_user or skill.uri in self._skills.find_activated(self._chat).active
        if not (known or skill.front.model_invocable):
            raise UnknownSkill(f"there is no skill {name!r}: skills_list shows those there are")
        return skill


@lru_cache(32)
def _by_name(catalogue: Catalogue) -> Placed:
    return sort_by_name(_for_models(catalogue))


@lru_cache(32)
def _for_models(catalogue: Catalogue) -> tuple[Skill, ...]:
    return tuple(skill for skill in catalogue.skills if skill.front.model_invocable)
