"""One prompt for each skill that users may invoke: its text, with their arguments put in."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from anyio import to_thread
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptMessage,
    TextContent,
)

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.skills.pages import page
from mcp_sandbox.server.skills.results import wrapped
from mcp_sandbox.server.skills.visible import Asked, Visible, folder_uri, shown
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import FrontMatter, Skill
from mcp_sandbox.skills.rules import ARGUMENTS
from mcp_sandbox.skills.uris import DOCUMENT, SCHEME

ALL = "arguments"
"""The argument of a skill that names none: everything that the user says, in one."""
_MOST_LISTED = 500
_MOST_SAID = 100_000
_MOST_FILLED = 1_000_000


class SkillPrompts:
    """Answers the protocol's requests about prompts."""

    def __init__(self, visible: Visible, session_for: SessionFor) -> None:
        self._visible = visible
        self._session_for = session_for

    @protocol_errors
    async def list(self, asked: Asked, params: PaginatedRequestParams) -> ListPromptsResult:
        """Those that users may invoke, though a model may not."""
        known = invocable(await self._visible.catalogue(asked))
        found = page(known, lambda name: name, params.cursor, _MOST_LISTED)
        prompts = [_prompt(name, known[name]) for name in found.items]
        return ListPromptsResult(prompts=prompts, next_cursor=found.next_cursor)

    @protocol_errors
    async def get(self, asked: Asked, params: GetPromptRequestParams) -> GetPromptResult:
        """The text of a skill, with the arguments where it wants them."""
        known = invocable(await self._visible.catalogue(asked))
        skill = known.get(params.name)
        if skill is None:
            problem = f"there is no prompt {shown(params.name)!r}: prompts/list shows all"
            raise MCPError(code=INVALID_PARAMS, message=problem)
        said = params.arguments or {}
        if sum(map(len, said.values())) > _MOST_SAID:
            raise _too_long()
        text = await self._text(asked, skill, said)
        message = PromptMessage(role="user", content=TextContent(type="text", text=text))
        return GetPromptResult(description=skill.front.description, messages=[message])

    async def _text(self, asked: Asked, skill: Skill, said: Mapping[str, str]) -> str:
        """The filled text; a chat also gets the skill's files into its sandbox."""
        if not isinstance(self._visible.whose(asked), ChatId):
            document = await self._visible.library.read(skill, DOCUMENT)
            return await _filled(document[skill.body_at :], skill.front, said)
        session = await self._session_for(Context(request_context=asked))
        got = await session.skills.activate(skill.uri, by_user=True)
        body = await _filled(got.body, skill.front, said)
        return wrapped(replace(got, body=body.encode(), repeated=False))


async def _filled(body: bytes, front: FrontMatter, said: Mapping[str, str]) -> str:
    # Up to a megabyte is searched for what the author chose.
    return await to_thread.run_sync(filled, body.decode(errors="replace"), front, said)


def invocable(catalogue: Catalogue) -> Mapping[str, Skill]:
    """The skills that users may invoke, by the names of their prompts.

    A skill whose name means another one goes by its path.
    """
    return {
        skill.name if skill.shadowed_by is None else folder_uri(skill).removeprefix(SCHEME): skill
        for skill in catalogue.skills
        if skill.front.user_invocable
    }


def filled(body: str, front: FrontMatter, given: Mapping[str, str]) -> str:
    """A body with arguments for `$ARGUMENTS`, and for `$0`, `$ARGUMENTS[0]` and `$name`.

    A body that wants none gets what was given at its end. Numbers count only in a skill that says
    it takes arguments: elsewhere a `$1` is some program's own.

    Raises:
        InvalidArgument: there is more than a prompt can hold.
    """
    names = front.arguments[:ARGUMENTS]
    values = _values(names, given)
    everything = " ".join(values) if names else given.get(ALL, "")
    declared = bool(front.arguments or front.argument_hint)
    used = False

    def value(match: re.Match[str]) -> str:
        nonlocal used
        number = match["index"] or match["number"]
        if number is not None and not (declared or match["index"]):
            return match[0]
        used = True
        if number is not None:
            return values[int(number)] if int(number) < len(values) else ""
        name = match["name"]
        return everything if name == "ARGUMENTS" else values[names.index(name)]

    placeholders = _placeholders(names)
    longest = max(map(len, (everything, *values)), default=0)
    if longest > _MOST_SAID or longest * len(placeholders.findall(body)) > _MOST_FILLED:
        raise _too_long()
    text = placeholders.sub(value, body)
    return text if used or not everything else f"{text.rstrip()}\n\nARGUMENTS: {everything}\n"


def _too_long() -> InvalidArgument:
    return InvalidArgument("the arguments are too long for this prompt: say it in a message")


def _values(names: Sequence[str], given: Mapping[str, str]) -> Sequence[str]:
    if names:
        return [given.get(name, "") for name in names]
    try:
        return shlex.split(given.get(ALL, ""))
    except ValueError:
        # A quotation mark that is one of its own, as in "don't".
        return given.get(ALL, "").split()


def _placeholders(names: Sequence[str]) -> re.Pattern[str]:
    known = "|".join(map(re.escape, sorted(("ARGUMENTS", *names), key=len, reverse=True)))
    return re.compile(
        rf"\$(?:ARGUMENTS\[(?P<index>\d{{1,3}})\]|(?P<number>\d{{1,3}})\b|(?P<name>{known})\b)"
    )


def _prompt(name: str, skill: Skill) -> Prompt:
    front = skill.front
    if front.arguments:
        names = front.arguments[:ARGUMENTS]
        arguments = [PromptArgument(name=each, required=False) for each in names]
    else:
        hint = front.argument_hint or "what to do, in your own words"
        arguments = [PromptArgument(name=ALL, description=hint, required=False)]
    return Prompt(name=name, description=front.description, arguments=arguments)
