"""What one chat is offered to learn, and what it has learned already.

Skills that their authors keep from models do not exist here. What a chat has activated is kept in
memory, so that a text is not given twice; a client that connects anew is given it again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcp_sandbox.errors import Busy, CallerError, NotPermitted, UnknownSkill
from mcp_sandbox.models import ChatId, Narrow
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.preflight import Scans, lacking
from mcp_sandbox.skills.allowed_tools import Narrowing, refusal
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.contents import digest_of
from mcp_sandbox.skills.finder import Finder
from mcp_sandbox.skills.front_matter import split
from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.models import Contents, Diagnostic, Findings, Skill, SkillFile, Unmet
from mcp_sandbox.skills.pages import Page, all_by_name
from mcp_sandbox.skills.roots import Whose
from mcp_sandbox.skills.uris import DOCUMENT

_MOST_CHATS = 1000
_TRIES = 3


@dataclass(frozen=True)
class Activation:
    """A skill as a chat got it. `body` is its text after the front matter, as it is in the file.

    `path_in_sandbox` is where its files lie there, if they do; `copied`: where the chat's code can
    change them. `unchecked` says why it is not known what the sandbox lacks. `drift` names the
    files that have changed in the library since; `left_out` says what its folder there has and
    nobody gets. `repeated`: the chat has been given this text before.
    """

    skill: Skill
    digest: str
    body: bytes
    contents: Contents
    path_in_sandbox: str | None = None
    copied: bool = False
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


@dataclass(frozen=True)
class Active:
    """A skill that a chat has activated, and which version of it."""

    uri: str
    name: str
    digest: str
    path_in_sandbox: str | None
    allowed_tools: tuple[str, ...] = ()


@dataclass
class Learned:
    """What a chat has activated, and the digests of what its client was given, both by uri.

    `warnings` are of calls that the skills do not name, until they are told.
    """

    active: dict[str, Active] = field(default_factory=dict[str, Active])
    told: dict[str, str] = field(default_factory=dict[str, str])
    warnings: set[str] = field(default_factory=set[str])


class Skills:
    """The skills of all chats."""

    def __init__(self, library: Library, narrow: Narrow = "off") -> None:
        """`narrow` is what happens to calls that the active skills do not name."""
        self.library = library
        self.narrow = narrow
        self.scans = Scans()
        self._learned: OrderedDict[ChatId, Learned] = OrderedDict()
        self.finder = Finder(library)

    def of(self, chat: ChatId, hold: Hold) -> "ChatSkills":
        """Those of one chat, which has its sandbox by `hold`."""
        return ChatSkills(chat, self, hold)

    async def offered(self, whose: Whose) -> tuple[Skill, ...]:
        """What the model may know of; those that another one hides are among them."""
        return _for_models(await self.library.catalogue(whose))

    def learned(self, chat: ChatId) -> Learned:
        """What the chat has activated."""
        learned = self._learned.setdefault(chat, Learned())
        self._learned.move_to_end(chat)
        if len(self._learned) > _MOST_CHATS:
            # Who has many chats makes the server forget the oldest of these, and not others'.
            oldest = next(known for known in self._learned if known.user == chat.user)
            del self._learned[next(iter(self._learned)) if oldest == chat else oldest]
        return learned

    def connected(self, chat: ChatId) -> None:
        """Its client is new and was not told anything yet."""
        if chat in self._learned:
            self._learned[chat].told.clear()


class ChatSkills:
    """The skills of one chat."""

    def __init__(self, chat: ChatId, skills: Skills, hold: Hold) -> None:
        self._chat = chat
        self._hold = hold
        self._skills = skills
        self._library = skills.library

    async def list(
        self, query: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page:
        """A page of what there is, by name; with a query of what matches, the best first.

        Raises:
            InvalidArgument: the cursor is not one of this listing.
        """
        catalogue = await self._library.catalogue(self._chat)
        offered = _for_models(catalogue)
        if query and query.strip():
            user = self._chat.user
            page = await self._skills.finder.find(user, offered, query, cursor, limit)
        else:
            page = all_by_name(offered, cursor, limit)
        return replace(page, notes=(*page.notes, *_problems(catalogue)))

    async def activate(
        self, name: str, *, refresh: bool = False, by_user: bool = False
    ) -> Activation:
        """The skill with its text, put where the sandbox sees it; a chat keeps what it got.

        `refresh`: as it is now, and also if it was given before. `by_user`: also one that its
        author keeps from models.

        Raises:
            UnknownSkill: there is none that the name means.
            Busy: it is just being changed.
            OperatorError: there is no sandbox to put it into.
        """
        skill = await self._found(name, by_user=by_user)
        learned = self._skills.learned(self._chat)
        activation = await self._put(skill, refresh=refresh) or await self._read_whole(skill)
        activation = await self._checked(activation)
        repeated = not refresh and learned.told.get(skill.uri) == activation.digest
        learned.active[skill.uri] = Active(
            skill.uri,
            skill.name,
            activation.digest,
            activation.path_in_sandbox,
            skill.front.allowed_tools,
        )
        learned.told[skill.uri] = activation.digest
        return replace(activation, repeated=repeated)

    async def _put(self, skill: Skill, *, refresh: bool) -> Activation | None:
        """Show it in the sandbox; None where sandboxes show none."""
        # With a sandbox the chat has its files, which those of a warm one may become.
        async with self._hold.call():
            pinned = await self._hold.pinning.activate(skill, self._library, refresh=refresh)
        if pinned is None:
            return None
        return Activation(
            skill,
            pinned.contents.digest,
            split(pinned.document).body,
            pinned.contents,
            path_in_sandbox=pinned.path,
            copied=pinned.copied,
            drift=pinned.drift,
            left_out=pinned.left_out,
        )

    async def _checked(self, activation: Activation) -> Activation:
        """With what its scripts use, and what of that the sandbox lacks."""

        async def read(file: SkillFile) -> bytes:
            data = await self._library.read(activation.skill, file.path)
            if digest_of(data) == file.digest:
                return data
            pinned = await self._hold.pinning.file(activation.skill, file.path)
            return pinned[1] if pinned else data

        scanned = await self._skills.scans.of(activation.contents, read)
        if scanned.is_empty:
            return activation
        async with self._hold.call() as held:
            try:
                unmet = await lacking(scanned, held)
            except CallerError as exc:
                return replace(activation, findings=scanned.findings, unchecked=str(exc))
        return replace(activation, findings=scanned.findings, unmet=unmet)

    async def _read_whole(self, skill: Skill) -> Activation:
        """Its text and its files as they were at one moment."""
        for _ in range(_TRIES):
            contents = await self._library.contents(skill)
            document = await self._library.read(skill, DOCUMENT)
            if _digest_in(contents, DOCUMENT) == digest_of(document):
                body = split(document).body
                left_out = contents.diagnostics
                return Activation(skill, contents.digest, body, contents, left_out=left_out)
        raise Busy(f"the files of {skill.name} are just being changed: call again in a moment")

    async def read(self, name: str, path: str) -> tuple[SkillFile, bytes]:
        """One file of a skill, as the chat has it.

        Raises:
            UnknownSkill: there is no such skill, or no such file in it.
        """
        skill = await self._found(name)
        pinned = await self._hold.pinning.file(skill, path)
        if pinned:
            contents, data = pinned
        else:
            data = await self._library.read(skill, path)
            contents = await self._library.contents(skill)
        known = next((file for file in contents.files if file.path == path), None)
        if known is None:
            raise UnknownSkill(f"{name} has no file {path!r}: skill_activate lists its files")
        # The bytes are those that are there now, whatever was there when they were listed.
        return replace(known, size=len(data), digest=digest_of(data)), data

    def forget(self) -> None:
        """The chat has begun anew, and has no skill."""
        learned = self._skills.learned(self._chat)
        learned.active.clear()
        learned.told.clear()

    def check_call(self, tool: str, arguments: Mapping[str, object]) -> None:
        """Warn of a call that the active skills do not name, or refuse it, as the operator wants.

        Raises:
            NotPermitted: it is refused.
        """
        if self._skills.narrow == "off":
            return
        active = [
            Narrowing(each.name, each.allowed_tools, each.path_in_sandbox or "")
            for each in self.active()
        ]
        why = refusal(active, tool, arguments)
        if why and self._skills.narrow == "deny":
            raise NotPermitted(f"{why}: use what they name, or tell the user what is in the way")
        if why:
            self._skills.learned(self._chat).warnings.add(f"note: {why}")

    def take_warnings(self) -> Sequence[str]:
        """The warnings that were not told yet; each is told once."""
        warnings = self._skills.learned(self._chat).warnings
        taken = sorted(warnings)
        warnings.clear()
        return taken

    def active(self) -> Sequence[Active]:
        """What the chat has activated, in that order."""
        return tuple(self._skills.learned(self._chat).active.values())

    async def _found(self, name: str, *, by_user: bool = False) -> Skill:
        catalogue = await self._library.catalogue(self._chat)
        skill = catalogue.find(name)
        known = by_user or skill.uri in self._skills.learned(self._chat).active
        if not (known or skill.front.model_invocable):
            raise UnknownSkill(f"there is no skill {name!r}: skills_list shows those there are")
        return skill


def _for_models(catalogue: Catalogue) -> tuple[Skill, ...]:
    return tuple(skill for skill in catalogue.skills if skill.front.model_invocable)


def _problems(catalogue: Catalogue) -> Iterable[str]:
    number = len(catalogue.unusable)
    if number:
        folders = "1 folder" if number == 1 else f"{number:,} folders"
        yield f"{folders} cannot be used; the user can ask `mcp-sandbox skills doctor` why"


def _digest_in(contents: Contents, path: str) -> str | None:
    return next((file.digest for file in contents.files if file.path == path), None)
